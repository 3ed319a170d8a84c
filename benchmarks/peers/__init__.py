"""The parts of `benchmarks/peers.py`; `drivers/` holds one small program per engine."""
