"""Checkpoints whose matrices other tools have quantised: how each format lays them out, and the one form in which all are computed."""
