"""From a socket to a request: listening, the start, one connection."""
