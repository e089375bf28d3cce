"""What every request passes: who may call, and one record of each call."""
