"""What runs on arrays inside a step."""
