"""`marathon certify`."""
