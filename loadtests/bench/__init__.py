"""Parts of the speed measurements: loads, clients, targets, rounds, numbers."""
