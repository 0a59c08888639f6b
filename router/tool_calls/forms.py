"""Texts around the parts of tool calls, as chat templates write them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterForm:
    """Parameters written one by one: ``opening`` name ``middle`` value ``closing``. Texts are written without quotes,
    other values as JSON.
    """

    opening: str
    middle: str
    text_middle: str = ""
    """Like ``middle``, before a text; empty if it is the same."""
    key_end: str
    """The part of ``middle`` at which a parser ends the name."""
    closing: str
    has_newlines: bool = False
    """True if a line break before and after the value is not part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """Calls: ``begin``, then for every call ``opening`` name ``middle`` arguments ``closing``, then ``end``."""

    begin: str = ""
    opening: str
    quotes_name: bool = False
    is_numbered: bool = False
    """True if "functions." precedes the name and a number follows it; all this is the call's id."""
    middle: str = ""
    parameter: ParameterForm | None = None
    """Form of parameters; None if the arguments are one JSON object."""
    closing: str
    between: str = ""
    end: str = ""
