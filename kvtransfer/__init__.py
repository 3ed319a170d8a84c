"""Moves KV blocks from one worker's pool to another's: handles, leases, digests, transports."""
