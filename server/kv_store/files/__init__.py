"""What lies on disk: names, the form of a file, the folder and its lock, and what is found by token ids."""
