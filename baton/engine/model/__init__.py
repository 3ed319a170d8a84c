"""The Llama family in plain torch: reading checkpoints, layers, paged attention, sampling."""
