"""How models write tool calls: what tells it from their chat template, reads their answers, and makes them call."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from cluster.spec.config import ToolParserName
from router.tool_calls import hermes, llama3
from router.tool_calls.events import ToolParser


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One way of writing calls."""

    parser: Callable[[Collection[str]], ToolParser]
    """Of one answer, given the names of the functions."""
    opening: str
    """Text of a call up to its name."""
    arguments: str
    """Text between name and arguments."""
    closing: str
    between: str
    """Text between calls."""
    markers: tuple[str, ...]
    """Texts that the parser must see, even if they are special tokens."""
    fits: Callable[[str], bool]
    """Whether a model with this chat template writes calls so."""

    def lark(self, names: Sequence[str], *, several: bool) -> list[str]:
        """Lark rules for ``calls``; the arguments of function i are the grammar ``arguments_i``."""
        one = [
            f"{_quote(f'{self.opening}{json.dumps(name)}{self.arguments}')} @arguments_{index} {_quote(self.closing)}"
            for index, name in enumerate(names)
        ]
        repeated = f" ({_quote(self.between)} call)*" if several else ""
        return [f"calls: call{repeated}", f"call: {' | '.join(one)}"]


DIALECTS: dict[str, Dialect] = {
    "hermes": Dialect(
        parser=hermes.HermesParser,
        opening='<tool_call>\n{"name": ',
        arguments=', "arguments": ',
        closing="}\n</tool_call>",
        between="\n",
        markers=(hermes.OPENING, hermes.CLOSING),
        # Others mark calls alike, but write no JSON between the marks.
        fits=lambda template: (
            hermes.OPENING in template and not any(other in template for other in ("<function=", "<arg_key>"))
        ),
    ),
    "llama3": Dialect(
        parser=llama3.Llama3Parser,
        opening='{"name": ',
        arguments=', "parameters": ',
        closing="}",
        between="; ",
        markers=(),
        fits=lambda template: llama3.TAG in template or ("<|eot_id|>" in template and '"parameters"' in template),
    ),
}


def find_dialect(setting: ToolParserName, template: str | None) -> Dialect | None:
    """The one of this name, or with ``auto`` the first that fits the template; None where no tools can be called."""
    if setting != "auto":
        return DIALECTS.get(setting)
    return next((dialect for dialect in DIALECTS.values() if template is not None and dialect.fits(template)), None)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
