"""Where a model's files are, and the starter model."""
