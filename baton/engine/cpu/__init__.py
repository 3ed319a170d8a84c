"""Kernels that are compiled for this processor, and what records and chooses among them."""
