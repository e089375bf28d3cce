"""`python -m server` is the command `marathon`."""

from server.cli import main

main()
