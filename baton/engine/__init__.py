"""Tokens in, tokens out, on one device."""
