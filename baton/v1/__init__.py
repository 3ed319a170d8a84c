"""Generated from proto/baton/v1; never edited by hand (scripts/generate.py)."""
