"""How a command reaches a cluster: the flags, the client's profile file, TLS and the API key."""
