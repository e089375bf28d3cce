"""The wire protocols, one module each, and what they share."""
