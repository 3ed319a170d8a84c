"""Tool calls and thinking in a model's text: what each family of models writes, and how it is read, whole or as it arrives."""
