"""What an answer must be made of, as one grammar for ``cluster.grammar``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.grammar import lark_of_regex
from router.json_schemas import mended
from router.reasoning import CLOSING, OPENING, Thinking

_WHITE_SPACE = r"[ \t\r\n]{0,40}"
"""Between the tokens of JSON; models that are made to write JSON may go on with white space for ever."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One grammar of several; others may name it."""

    field: str
    """Of the request, to be told where the grammar is wrong."""
    grammar: Mapping[str, Any]
    """In llguidance's JSON form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Alternatives for an answer."""

    rules: Sequence[str]
    """Lark rules; the first words before ":" of those in ``starts`` are the alternatives."""
    starts: Sequence[str]
    parts: Mapping[str, Part]
    """By the name with which rules refer to them."""

    def grammar(self, thinking: Thinking, special_texts: frozenset[str]) -> str:
        """The whole, with thoughts before it. special_texts: how special tokens are written."""
        start = f"start: {_thoughts(thinking)}({' | '.join(self.starts)})"
        lark = "\n".join([start, *self.rules, *_thought_rules(thinking, special_texts)])
        named = [{"name": name, **part.grammar} for name, part in self.parts.items()]
        return grammar_text({"lark_grammar": lark}, *named)


def grammar_text(*grammars: Mapping[str, Any]) -> str:
    """Grammars of which the first is that of the text."""
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def answer_of(part: Part) -> Constraint:
    """The answer follows one grammar."""
    return Constraint(rules=(), starts=("@answer",), parts={"answer": part})


def either(one: Constraint, other: Constraint) -> Constraint:
    """The answer is of one kind or the other."""
    return Constraint(
        rules=(*one.rules, *other.rules), starts=(*one.starts, *other.starts), parts={**one.parts, **other.parts}
    )


def json_part(schema: Mapping[str, Any] | bool, field: str) -> Part:
    """A JSON value by its schema; ``x-guidance`` in it may set other options of llguidance."""
    if schema is False:
        return Part(field=field, grammar={"json_schema": False})
    given = {} if schema is True else mended(schema)
    options = {"whitespace_pattern": _WHITE_SPACE}
    own = given.get("x-guidance", {})
    if isinstance(own, dict):
        own = own if "whitespace_flexible" in own or "whitespace_pattern" in own else options | own
    return Part(field=field, grammar={"json_schema": given | {"x-guidance": own}})


def regex_part(regex: str, field: str) -> Part:
    """A text that matches as a whole."""
    return Part(field=field, grammar={"lark_grammar": lark_of_regex(regex)})


def choice_part(choices: Sequence[str], field: str) -> Part:
    """One of several texts."""
    written = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    # A terminal (in capitals) is followed as one automaton; alternatives of a rule would each be followed alone.
    return Part(field=field, grammar={"lark_grammar": f"start: CHOICE\nCHOICE: {written}"})


def lark_part(lark: str, field: str) -> Part:
    """A text by a grammar in Lark's syntax."""
    return Part(field=field, grammar={"lark_grammar": lark})


def _thoughts(thinking: Thinking) -> str:
    return {Thinking.NONE: "", Thinking.OPTIONAL: "(opening thoughts)? ", Thinking.BEGUN: "thoughts "}[thinking]


def _thought_rules(thinking: Thinking, special_texts: frozenset[str]) -> list[str]:
    if thinking is Thinking.NONE:
        return []
    opening = OPENING if OPENING in special_texts else json.dumps(OPENING)
    if CLOSING in special_texts:
        thoughts = [f"thoughts: /(?s:.*)/ {CLOSING} /\\n{{0,2}}/"]
    else:
        thoughts = ["thoughts: thought /\\n{0,2}/", f"thought[suffix={json.dumps(CLOSING)}]: /(?s:.*)/"]
    return [f"opening: {opening}", *thoughts]
