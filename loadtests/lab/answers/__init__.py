"""What the rows of each program answer: one module a section of the report."""
