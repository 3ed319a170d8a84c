"""What the files of a model's folder declare, each with the place where it says so. Nothing here imports torch."""
