"""Workloads, arrivals, goodput: whether disaggregation pays."""
