"""The required form of an answer, as one grammar for ``cluster.grammar``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.grammar import lark_of_regex
from router.json_schemas import without_noops
from router.reasoning import CLOSING, OPENING, Thinking

_WHITE_SPACE = r"[ \t\r\n]{0,40}"
"""White space between JSON tokens, limited because a model that must write JSON may continue with it for ever."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One grammar of several; others may refer to it."""

    field: str
    """The field of the body, for errors."""
    grammar: Mapping[str, Any]
    """Grammar in llguidance's JSON form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Alternative forms of an answer."""

    rules: Sequence[str]
    """Lark rules; those named in ``starts`` are the alternatives."""
    starts: Sequence[str]
    parts: Mapping[str, Part]
    """Parts by their name in the rules."""

    def grammar(self, thinking: Thinking, special_texts: frozenset[str]) -> str:
        """Return the whole grammar, with thoughts before the answer.

        Args:
            special_texts: how special tokens are written.
        """
        start = f"start: {_thoughts(thinking)}({' | '.join(self.starts)})"
        lark = "\n".join([start, *self.rules, *_thought_rules(thinking, special_texts)])
        named = [{"name": name, **part.grammar} for name, part in self.parts.items()]
        return grammar_text({"lark_grammar": lark}, *named)


def grammar_text(*grammars: Mapping[str, Any]) -> str:
    """Join grammars, the first of which is that of the text."""
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def answer_of(part: Part) -> Constraint:
    return Constraint(rules=(), starts=("@answer",), parts={"answer": part})


def either(one: Constraint, other: Constraint) -> Constraint:
    return Constraint(
        rules=(*one.rules, *other.rules), starts=(*one.starts, *other.starts), parts={**one.parts, **other.parts}
    )


def json_part(schema: Mapping[str, Any] | bool, field: str) -> Part:
    """Return the grammar of a JSON schema, whose ``x-guidance`` may set other options of llguidance."""
    if schema is False:
        return Part(field=field, grammar={"json_schema": False})
    given = {} if schema is True else without_noops(schema)
    options = {"whitespace_pattern": _WHITE_SPACE}
    own = given.get("x-guidance", {})
    if isinstance(own, dict):
        own = own if "whitespace_flexible" in own or "whitespace_pattern" in own else options | own
    return Part(field=field, grammar={"json_schema": given | {"x-guidance": own}})


def regex_part(regex: str, field: str) -> Part:
    """Return the grammar of a regular expression, which the whole text matches."""
    return Part(field=field, grammar={"lark_grammar": lark_of_regex(regex)})


def choice_part(choices: Sequence[str], field: str) -> Part:
    written = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    # A terminal (in capitals) is one automaton; alternatives of a rule would each be followed on their own.
    return Part(field=field, grammar={"lark_grammar": f"start: CHOICE\nCHOICE: {written}"})


def lark_part(lark: str, field: str) -> Part:
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
