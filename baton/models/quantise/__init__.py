"""Rounds a model's matrices to few bits, with what they are multiplied with in mind. Each method is one file."""
