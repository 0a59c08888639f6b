"""Prompt for which the demo model's answer is known, and how its server is addressed."""

MODEL = "recall"
KEY = "none"
PROMPT = "The launch code is tango seven.\nThe launch code is"
ANSWER = " tango seven."
TIMEOUT_S = 60
LATE_S = 12
"""Time to the first token of a server that is late: longer than the interval of the empty events before it."""
