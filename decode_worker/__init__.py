"""Fetches or computes a prompt's KV and generates with continuous batching."""
