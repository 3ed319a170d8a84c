"""The OpenAI-compatible HTTP door: translates, and nothing else; `router.service` answers."""
