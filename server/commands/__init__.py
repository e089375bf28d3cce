"""Commands for people: what a running server does, a question to it, and which models fit this machine."""
