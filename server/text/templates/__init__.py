"""Conversations as a model's chat template takes them."""
