"""From the bytes of a request to sequences for the engine; refusals come from here."""
