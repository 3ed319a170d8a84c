"""Checkpoints that the project makes itself."""
