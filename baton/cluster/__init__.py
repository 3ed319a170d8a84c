"""What all processes agree on, and who is alive."""
