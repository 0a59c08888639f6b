"""Grammar of tool calls, over the schemas of the functions' parameters."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from router.errors import bad_request
from router.preprocess.constrain import ANY_OBJECT, NOTES, Constraint, Part, json_part
from router.tool_calls.arguments import JsonTypes
from router.tool_calls.dialects import Dialect
from router.tool_calls.forms import ParameterForm

_DEFINITIONS = ("$defs", "definitions")
_ENFORCED = frozenset({"type", "properties", "required", "additionalProperties", "$schema", *_DEFINITIONS}) | NOTES
"""Keywords of a function's schema that are enforced where a model writes parameters one by one."""


class Callee(NamedTuple):
    """Function that the model may call."""

    name: str
    schema: Mapping[str, Any] | None
    """Schema of its parameters; None if any arguments are allowed."""
    field: str
    """Field of the request that has the schema, for errors."""


def call_constraint(
    dialect: Dialect, callees: Sequence[Callee], whole_texts: frozenset[str], *, several: bool, with_text: bool
) -> Constraint:
    """Return the grammar of calls. With ``with_text``, any text may precede or replace them.

    Args:
        whole_texts: texts of single tokens; a marker among them must be generated as that token.

    Raises:
        ApiError: a schema cannot be enforced.
    """
    grammar = _CallGrammar(dialect, whole_texts)
    arguments = [grammar.arguments(number, callee) for number, callee in enumerate(callees)]
    names = [callee.name for callee in callees]
    rules = grammar.text_rules(names, several=several) if with_text else []
    rules += grammar.call_rules(names, several=several)
    return Constraint(
        rules=[*rules, *grammar.value_rules(), *(rule for rules, _ in arguments for rule in rules)],
        starts=("free" if with_text else "calls",),
        parts={name: part for _, parts in arguments for name, part in parts.items()},
    )


class _CallGrammar:
    """Lark rules for the calls of one request. The arguments of function i are ``arguments_i``."""

    def __init__(self, dialect: Dialect, whole_texts: frozenset[str]) -> None:
        self._dialect, self._form = dialect, dialect.form
        self._whole = whole_texts.intersection(dialect.markers)

    def call_rules(self, names: Sequence[str], *, several: bool) -> list[str]:
        calls = f"{self._literal(self._form.begin)} call{self._more(several=several)}"
        return [f"calls: {calls}", f"call: {self._call(self._form.opening, names)}"]

    def text_rules(self, names: Sequence[str], *, several: bool) -> list[str]:
        """Return rules for ``free``: optional text, then optional calls."""
        marker, text = self._dialect.marker, f"TEXT: {self._dialect.text}"
        if not marker:
            return ["free: TEXT? | calls", text]
        if marker in self._whole:
            return ["free: TEXT? calls?", text]
        # Text is matched greedily, so the first call's marker has to end it.
        rest = (self._form.begin + self._form.opening).removeprefix(marker)
        return [
            f"free: TEXT? | lead rest{self._more(several=several)}",
            text,
            f"lead[suffix={json.dumps(marker)}]: /(?s:.*)/",
            f"rest: {self._call(rest, names)}",
        ]

    def arguments(self, number: int, callee: Callee) -> tuple[list[str], dict[str, Part]]:
        """Return the rules and parts for the arguments of one function."""
        name, schema, form = f"arguments_{number}", callee.schema, self._form.parameter
        if form is None:
            return [], {name: json_part(ANY_OBJECT if schema is None else {**ANY_OBJECT, **schema}, callee.field)}
        if schema is None:
            return [f"{name}: any_parameter*"], {}
        properties, required = _properties(schema, callee.field)
        if not properties:
            return [f'{name}: ""' if schema.get("additionalProperties") is False else f"{name}: any_parameter*"], {}
        rules, parts, members = [], dict[str, Part](), []
        types = JsonTypes(schema)
        for index, (key, own) in enumerate(properties.items()):
            rule, value = f"parameter_{number}_{index}", f"value_{number}_{index}"
            members.append(rule if key in required else f"{rule}?")
            alternatives, has_json = self._parameter(form, key, own, types.of(own), f"@{value}")
            rules.append(f"{rule}: {' | '.join(alternatives)}")
            if has_json:
                shared = {each: schema[each] for each in _DEFINITIONS if each in schema}
                parts[value] = json_part({**shared, **own}, callee.field)
        return [f"{name}: {' '.join(members)}", *rules], parts

    def value_rules(self) -> list[str]:
        """Return the rules that all parameters share."""
        form = self._form.parameter
        if form is None:
            return []
        if form.closing.strip() in self._whole:
            text = f"text_value: /(?s:.*)/ {self._literal(form.closing)}"
        else:
            text = f"text_value[suffix={json.dumps(form.closing)}]: /(?s:.*)/"
        middle = self._literal(form.text_middle or form.middle)
        parameter = f"any_parameter: {self._literal(form.opening)} KEY {middle} text_value"
        return [text, parameter, 'KEY: /[^<>"\\n]+/']

    def _parameter(
        self, form: ParameterForm, key: str, own: Any, types: frozenset[str] | None, value: str
    ) -> tuple[list[str], bool]:
        """Return the alternatives of one parameter, and whether one of them is JSON, with the grammar ``value``."""
        start, closing = self._literal(form.opening + key + form.middle), self._literal(form.closing)
        text_start = self._literal(form.opening + key + (form.text_middle or form.middle))
        fixed = own.get("enum", [own["const"]] if "const" in own else None) if isinstance(own, dict) else None
        if isinstance(fixed, list) and fixed:
            starts = [text_start if isinstance(each, str) else start for each in fixed]
            values = [self._literal(_written(each) + form.closing) for each in fixed]
            return [" ".join(each) for each in zip(starts, values, strict=True)], False
        text, in_json = f"{text_start} text_value", f"{start} {value} {closing}"
        if types is not None and "string" not in types:
            return [in_json], True
        is_text = not form.text_middle or not isinstance(own, dict) or (types is not None and len(types) == 1)
        return ([text], False) if is_text else ([text, in_json], True)

    def _call(self, opening: str, names: Sequence[str]) -> str:
        reference = "@arguments" if self._form.parameter is None else "arguments"
        closing = self._literal(self._form.closing)
        return " | ".join(
            f"{self._called(opening, name)} {reference}_{number} {closing}" for number, name in enumerate(names)
        )

    def _called(self, opening: str, name: str) -> str:
        form = self._form
        if form.is_numbered:
            return f"{self._literal(f'{opening}functions.{name}:')} /[0-9]{{1,4}}/ {self._literal(form.middle)}"
        return self._literal(opening + (json.dumps(name) if form.quotes_name else name) + form.middle)

    def _more(self, *, several: bool) -> str:
        more = f" ({self._literal(self._form.between)} call)*" if several else ""
        return f"{more} {self._literal(self._form.end)}"

    def _literal(self, text: str) -> str:
        """Convert text to Lark's syntax, with markers that are single tokens by name."""
        pieces = re.split(f"({'|'.join(map(re.escape, self._whole))})", text) if self._whole else [text]
        written = (piece if piece in self._whole else json.dumps(piece, ensure_ascii=False) for piece in pieces)
        return " ".join(piece for piece in written if piece != '""')


def _properties(schema: Mapping[str, Any], field: str) -> tuple[dict[str, Any], Sequence[str]]:
    """Return the schemas of all parameters that can be written, and the names of those that must be."""
    if unknown := sorted(schema.keys() - _ENFORCED):
        reason = "not supported at the top of a schema in this model's format of calls"
        allowed = "allowed: properties, required, additionalProperties, $defs"
        raise bad_request(f"{field}: {unknown[0]}: {reason}; {allowed}", field)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.get("type", "object") != "object" or not isinstance(properties, dict):
        raise bad_request(f"{field}: must be an object's schema, with an object of properties", field)
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise bad_request(f"{field}.required: must be a list of names", field)
    return properties | {name: True for name in required if name not in properties}, required


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
