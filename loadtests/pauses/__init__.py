"""Whether anything that a client sends can stop the streams of others."""
