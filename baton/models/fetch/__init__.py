"""Fetches a model's folder from a hub or an S3 store: resumed after any cut, every byte verified, never half visible."""
