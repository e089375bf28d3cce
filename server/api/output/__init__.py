"""From token ids to an HTTP answer, streamed or whole."""
