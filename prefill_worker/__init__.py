"""Computes prompts and leases their KV to decode workers."""
