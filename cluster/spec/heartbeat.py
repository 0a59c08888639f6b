"""The pulse of a cluster, which every process must agree on."""

HEARTBEAT_S = 1.0
"""Interval between the heartbeats of a rank: a lost replica is noticed within seconds, at next to no load."""
LEASE_S = 3.0
"""Silence of a leader after which its replica gets no requests: two lost heartbeats in a row are still forgiven."""
