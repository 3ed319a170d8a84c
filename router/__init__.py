"""Decides where each request goes: door, dispatch, policy, view, prefix index, admission, tokenizer."""
