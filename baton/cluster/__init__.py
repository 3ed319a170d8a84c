"""What all processes agree on, and which of them are alive."""
