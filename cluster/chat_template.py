"""Chat templates of a model folder."""

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.model_folder import assigned_text, read_json
from cluster.spec.errors import UserError


class _Generation(Extension):
    """Jinja tag ``{% generation %}``, which marks the model's own text and leaves it unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str | None) -> Template | None:
    """Compile a chat template.

    Raises:
        UserError: the template is not valid.
    """
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
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
    if not templates and model_type == "deepseek_v32":
        return {"default": _deepseek_template(folder)}
    return templates


def _deepseek_template(folder: Path) -> str:
    """Return a template for DeepSeek-V3.2, whose repository has none. The texts about tools are the folder's own."""
    path = Path(__file__).parent / "chat_templates" / "deepseek_v32.jinja"
    values = [json.dumps(value, ensure_ascii=False) for value in _tools_text(folder)]
    return f"{{%- set tools_text, tools_problem = {', '.join(values)} -%}}\n{path.read_text(encoding='utf-8')}"


def _tools_text(folder: Path) -> tuple[str, str]:
    """Return the text about tools for DeepSeek-V3.2, from Python code that is not run, or why it is missing."""
    path = folder / "encoding" / "encoding_dsv32.py"
    if not path.is_file():
        return "", f"tools need {path}, which DeepSeek's repository has"
    text = assigned_text(path, "TOOLS_SYSTEM_TEMPLATE")
    return ("", f"{path} has no TOOLS_SYSTEM_TEMPLATE") if text is None else (text, "")
