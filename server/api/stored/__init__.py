"""Answers that are kept: made without their client, followed by any number of readers, told again at any time."""
