"""Thoughts in a form that clients keep for the next request and do not look into, though nothing here hides them."""

import base64
from contextlib import suppress

_OURS = b"baton\0"
"""What others call encrypted does not begin so."""


def sealed(text: str) -> str:
    """For ``encrypted_content``."""
    return base64.b64encode(_OURS + text.encode()).decode()


def unsealed(content: str) -> str:
    """The text; empty for what is not from here."""
    with suppress(ValueError):
        raw = base64.b64decode(content, validate=True)
        if raw.startswith(_OURS):
            return raw.removeprefix(_OURS).decode()
    return ""
