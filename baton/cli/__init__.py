"""The commands of `baton`, which people type."""
