"""Grammars of outputs: what of a JSON Schema is enforced, and masks of the tokens that may come next."""
