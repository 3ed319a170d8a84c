"""Sizes pools and flips roles: what load comes, what it needs, and what to change now."""
