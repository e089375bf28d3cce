"""What crosses between the processes."""
