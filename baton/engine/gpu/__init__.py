"""What an engine needs on a CUDA device: kernels, attention backends, graphs, and a runner that keeps one step in flight."""
