"""Chat templates of a model folder."""

import ast
import datetime
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.spec.errors import UserError

_BUILT_IN = ("deepseek_v32",)
"""Model types whose repositories have no template, and that have one in ``chat_templates``."""


class _Generation(Extension):
    """Jinja tag ``{% generation %}``, which marks the model's own text and leaves it unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str | None, folder: Path) -> Template | None:
    """Compile a template of the model in this folder.

    Raises:
        UserError: the template is not valid.
    """
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, tools_text=partial(_tools_text, folder)
    )
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise UserError(f"the model's chat template is not valid: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Encode JSON without escaping HTML, unlike Jinja's own filter but like the models' training data."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def read_templates(folder: Path, tokenizer_config: Mapping[str, Any], model_type: str | None) -> dict[str, str]:
    """Return chat templates by name; the only one of most models is the default one.

    Raises:
        UserError: they are not texts.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        paths = {"default": path} | {other.stem: other for other in others}
        return {name: each.read_text(encoding="utf-8") for name, each in paths.items()}
    given = read_json(folder / "chat_template.json").get("chat_template", tokenizer_config.get("chat_template"))
    entries = [] if given is None else given if isinstance(given, list) else [{"name": "default", "template": given}]
    templates: dict[str, str] = {}
    for entry in entries:
        match entry:
            case {"name": str(name), "template": str(template)}:
                templates[name] = template
            case _:
                raise UserError(f"{folder}: chat_template is {given!r}; allowed: a text, or names with templates")
    if not templates and model_type in _BUILT_IN:
        built_in = Path(__file__).parent / "chat_templates" / f"{model_type}.jinja"
        return {"default": built_in.read_text(encoding="utf-8")}
    return templates


def _tools_text(folder: Path, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return what DeepSeek-V3.2 reads about tools, from the Python code in its folder, which is not run."""
    path = folder / "encoding" / "encoding_dsv32.py"
    if not path.is_file():
        raise TemplateError(f"tools need {path}, which DeepSeek's repository has")
    texts = [
        value
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TOOLS_SYSTEM_TEMPLATE"
        if isinstance(node.value, ast.Constant) and isinstance(value := node.value.value, str)
    ]
    if not texts:
        raise TemplateError(f"{path} has no TOOLS_SYSTEM_TEMPLATE")
    schemas = "\n".join(_to_json(tool["function"]) for tool in tools)
    values = {"dsml_token": "｜DSML｜", "thinking_start_token": "<think>", "thinking_end_token": "</think>"}
    text = texts[0]
    for name, value in (values | {"tool_schemas": schemas}).items():
        text = text.replace(f"{{{name}}}", value)
    return text


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, but holds a {type(content).__name__}")
    return content
