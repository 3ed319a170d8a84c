"""The OpenAI-compatible HTTP door. It only translates; `router.service` answers."""
