"""Answers that are kept: made without their client, followed by any number of readers, sent again at any time."""
