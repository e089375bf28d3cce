"""Text and token ids: templates, encoding, decoding, reasoning and tool calls."""
