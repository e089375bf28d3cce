"""Tool calls in an answer's text, for every format."""
