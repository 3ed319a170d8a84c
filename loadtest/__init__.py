"""Workloads, arrivals and goodput: does disaggregation pay?"""
