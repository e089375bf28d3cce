"""Where settings are written, and where Marathon keeps what it makes."""
