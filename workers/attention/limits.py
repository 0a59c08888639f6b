"""Limits on the memory that a selection of keys takes. Does not import torch, so that the planner can use them."""

MOST_SCORED = 1 << 22
"""Maximum number of products of an indexer's heads, and of elements of its keys, that exist at a time, in fp32."""
MOST_CAPTURED_SCORES = 1 << 25
"""Maximum number of scores that exist at a time in a captured step, unless a single request has more."""
MOST_SELECTED = 1 << 22
"""Maximum number of elements of selected rows that exist at a time, in fp32, if a single query has no more."""
