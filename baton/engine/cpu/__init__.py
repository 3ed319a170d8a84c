"""What only a CPU does: compiled kernels, products of oneDNN, memory."""
