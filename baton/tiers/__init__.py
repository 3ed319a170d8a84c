"""Colder copies of KV, under the pool."""
