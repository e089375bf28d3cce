"""Forms of an answer as grammars, checked before they are queued."""
