"""Formats of tool calls: detection in the chat template, parsing of answers, and grammars that enforce calls."""

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from cluster.spec.config import ToolParserName
from router.tool_calls.parsers import CLOSING, KEYS, OPENING, PYTHON_TAG, HermesParser, Llama3Parser, ToolParser


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    parser: Callable[[Collection[str]], ToolParser]
    opening: str
    """Text before a call's name."""
    arguments: str
    """Text between a call's name and its arguments."""
    closing: str
    between: str
    text: str
    """Lark terminal for text without calls."""
    marker: str
    """The part of ``opening`` that can follow text; empty if calls are only at the start of an answer."""
    markers: tuple[str, ...]
    """Texts that the parser needs, even if they are special tokens."""
    fits: Callable[[str], bool]
    """Function that returns whether a model with this chat template uses the dialect."""

    def lark(self, names: Sequence[str], whole_texts: frozenset[str], *, several: bool) -> list[str]:
        """Return Lark rules for ``calls``. The arguments of function i are the grammar ``arguments_i``.

        Args:
            whole_texts: texts of single tokens; a marker among them must be generated as that token.
        """
        whole = whole_texts.intersection(self.markers)
        call = self._call(self.opening, names, whole)
        return [f"calls: call{self._more(whole, several=several)}", f"call: {call}"]

    def text_lark(self, names: Sequence[str], whole_texts: frozenset[str], *, several: bool) -> list[str]:
        """Return additional Lark rules for ``free``: optional text, then optional calls."""
        whole = whole_texts.intersection(self.markers)
        text = f"TEXT: {self.text}"
        if not self.marker:
            return ["free: TEXT? | calls", text]
        if self.marker in whole:
            return ["free: TEXT? calls?", text]
        # Text is matched greedily, so the first call's marker has to end it.
        rest = self._call(self.opening.removeprefix(self.marker), names, whole)
        return [
            f"free: TEXT? | lead rest{self._more(whole, several=several)}",
            text,
            f"lead[suffix={json.dumps(self.marker)}]: /(?s:.*)/",
            f"rest: {rest}",
        ]

    def _call(self, opening: str, names: Sequence[str], whole: frozenset[str]) -> str:
        return " | ".join(
            f"{_literal(opening + json.dumps(name) + self.arguments, whole)} @arguments_{index} "
            f"{_literal(self.closing, whole)}"
            for index, name in enumerate(names)
        )

    def _more(self, whole: frozenset[str], *, several: bool) -> str:
        return f" ({_literal(self.between, whole)} call)*" if several else ""


_MEMBERS = "|".join(f'"{key}"' for key in sorted(KEYS))
"""Possible first keys of a call's object."""

DIALECTS: dict[str, Dialect] = {
    "hermes": Dialect(
        parser=lambda _names: HermesParser(),
        opening='<tool_call>\n{"name": ',
        arguments=', "arguments": ',
        closing="}\n</tool_call>",
        between="\n",
        text=f"/(?s:.+)/ & ~/(?s:.*){OPENING}(?s:.*)/",
        marker=OPENING,
        markers=(OPENING, CLOSING),
        # Other models use the same markers without JSON between them.
        fits=lambda template: (
            OPENING in template and not any(other in template for other in ("<function=", "<arg_key>"))
        ),
    ),
    "llama3": Dialect(
        parser=Llama3Parser,
        opening='{"name": ',
        arguments=', "parameters": ',
        closing="}",
        between="; ",
        text=rf"/(?s:.+)/ & ~/\s*({re.escape(PYTHON_TAG)})?\s*\{{\s*({_MEMBERS})(?s:.*)/",
        marker="",
        markers=(),
        fits=lambda template: PYTHON_TAG in template or '{"name": function name, "parameters": ' in template,
    ),
}


def find_dialect(setting: ToolParserName, template: str | None) -> Dialect | None:
    """Return the dialect that the setting names; for ``auto``, the first one that fits the template, if any."""
    if setting != "auto":
        return DIALECTS.get(setting)
    return next((dialect for dialect in DIALECTS.values() if template is not None and dialect.fits(template)), None)


def _literal(text: str, whole: frozenset[str]) -> str:
    """Convert text to Lark's syntax, with markers that are single tokens by name."""
    pieces = re.split(f"({'|'.join(map(re.escape, whole))})", text) if whole else [text]
    return " ".join(piece if piece in whole else json.dumps(piece, ensure_ascii=False) for piece in pieces if piece)
