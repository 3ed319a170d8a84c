"""Bytes of KV blocks from one worker's pool to another's: handle, lease, digest, transports."""
