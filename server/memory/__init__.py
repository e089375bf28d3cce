"""Live buffers, bytes and pressure."""
