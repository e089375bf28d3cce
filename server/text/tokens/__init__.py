"""Text to token ids, control apart from what is typed; token ids to bytes."""
