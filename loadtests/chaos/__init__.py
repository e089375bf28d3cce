"""Chaos: `python -m loadtests.chaos`."""
