"""One program per engine, run by that engine's own interpreter: JSON lines in, JSON lines out (`peers.driver`)."""
