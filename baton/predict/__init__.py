"""What the load test would report of a cluster that is simulated, and the measurements that the simulation needs."""
