"""What coding agents need to know of this server."""
