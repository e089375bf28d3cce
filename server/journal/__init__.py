"""Stored answers: what outlives the server process."""
