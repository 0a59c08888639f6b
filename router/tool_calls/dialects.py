"""Formats of tool calls: how each is parsed, and how it is detected in a chat template."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cluster.spec.router_config import ToolParserName
from router.tool_calls.arguments import ParameterTypes
from router.tool_calls.events import ToolParser
from router.tool_calls.forms import CallForm, ParameterForm
from router.tool_calls.json_parsers import CLOSING, KEYS, OPENING, PYTHON_TAG, HermesParser, Llama3Parser
from router.tool_calls.tagged_parser import TaggedParser


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    parser: Callable[[Mapping[str, ParameterTypes]], ToolParser]
    """Function that makes a parser for functions, given by name."""
    form: CallForm
    text: str
    """Lark terminal for text without calls."""
    marker: str
    """The first part of a call that can follow text; empty if calls are only at the start of an answer."""
    markers: tuple[str, ...]
    """Texts that the parser needs, even if they are special tokens."""
    fits: Callable[[str], bool]
    """Function that returns whether a model with this chat template uses the dialect."""


def _tagged(form: CallForm, fits: Callable[[str], bool], *markers: str) -> Dialect:
    """Return a dialect whose calls are between tags; the first marker begins a call after text."""
    return Dialect(
        parser=lambda functions: TaggedParser(form, functions),
        form=form,
        text=_text_without(markers[0]),
        marker=markers[0],
        markers=markers,
        fits=fits,
    )


def _text_without(marker: str) -> str:
    return f"/(?s:.+)/ & ~/(?s:.*){re.escape(marker)}(?s:.*)/"


_MEMBERS = "|".join(f'"{key}"' for key in sorted(KEYS))
"""Possible first keys of a call's object."""

_HERMES = Dialect(
    parser=lambda _functions: HermesParser(),
    form=CallForm(
        opening='<tool_call>\n{"name": ',
        quotes_name=True,
        middle=', "arguments": ',
        closing="}\n</tool_call>",
        between="\n",
    ),
    text=_text_without(OPENING),
    marker=OPENING,
    markers=(OPENING, CLOSING),
    # Other models use the same markers without JSON between them.
    fits=lambda template: OPENING in template and not any(other in template for other in ("<function=", "<arg_key>")),
)

_LLAMA3 = Dialect(
    parser=Llama3Parser,
    form=CallForm(opening='{"name": ', quotes_name=True, middle=', "parameters": ', closing="}", between="; "),
    text=rf"/(?s:.+)/ & ~/\s*({re.escape(PYTHON_TAG)})?\s*\{{\s*({_MEMBERS})(?s:.*)/",
    marker="",
    markers=(),
    fits=lambda template: PYTHON_TAG in template or '{"name": function name, "parameters": ' in template,
)

_QWEN3_CODER = _tagged(
    CallForm(
        begin="<tool_call>\n",
        opening="<function=",
        middle=">\n",
        parameter=ParameterForm(
            opening="<parameter=", middle=">\n", key_end=">", closing="\n</parameter>\n", has_newlines=True
        ),
        closing="</function>\n",
        between="</tool_call>\n<tool_call>\n",
        end="</tool_call>",
    ),
    lambda template: "<function=" in template and "<parameter=" in template,
    OPENING,
    CLOSING,
)

_GLM47 = _tagged(
    CallForm(
        opening="<tool_call>",
        parameter=ParameterForm(
            opening="<arg_key>", middle="</arg_key><arg_value>", key_end="<arg_value>", closing="</arg_value>"
        ),
        closing="</tool_call>",
    ),
    lambda template: "<arg_key>" in template,
    OPENING,
    CLOSING,
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)

_DEEPSEEK_MARKERS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)

_DEEPSEEK_V3 = _tagged(
    CallForm(
        begin="<｜tool▁calls▁begin｜>",
        opening="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle="\n```json\n",
        closing="\n```<｜tool▁call▁end｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
    ),
    lambda template: "<｜tool▁sep｜>" in template and "```json" in template,
    *_DEEPSEEK_MARKERS,
)

_DEEPSEEK_V31 = _tagged(
    CallForm(
        begin="<｜tool▁calls▁begin｜>",
        opening="<｜tool▁call▁begin｜>",
        middle="<｜tool▁sep｜>",
        closing="<｜tool▁call▁end｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    lambda template: "<｜tool▁sep｜>" in template and "```json" not in template,
    *_DEEPSEEK_MARKERS,
)

_DEEPSEEK_V32 = _tagged(
    CallForm(
        begin="<｜DSML｜function_calls>\n",
        opening='<｜DSML｜invoke name="',
        middle='">\n',
        parameter=ParameterForm(
            opening='<｜DSML｜parameter name="',
            middle='" string="false">',
            text_middle='" string="true">',
            key_end='">',
            closing="</｜DSML｜parameter>\n",
        ),
        closing="</｜DSML｜invoke>\n",
        end="</｜DSML｜function_calls>",
    ),
    lambda template: "｜DSML｜" in template,
    "<｜DSML｜function_calls>",
    "｜DSML｜",
)

_KIMI_K2 = _tagged(
    CallForm(
        begin="<|tool_calls_section_begin|>",
        opening="<|tool_call_begin|>",
        is_numbered=True,
        middle="<|tool_call_argument_begin|>",
        closing="<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
    ),
    lambda template: "<|tool_calls_section_begin|>" in template,
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)

DIALECTS: dict[str, Dialect] = {
    "hermes": _HERMES,
    "llama3": _LLAMA3,
    "qwen3_coder": _QWEN3_CODER,
    "glm47": _GLM47,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "deepseek_v32": _DEEPSEEK_V32,
    "kimi_k2": _KIMI_K2,
}


def find_dialect(setting: ToolParserName, template: str | None) -> Dialect | None:
    """Return the dialect that the setting names; for ``auto``, the first one that fits the template, if any."""
    if setting != "auto":
        return DIALECTS.get(setting)
    return next((dialect for dialect in DIALECTS.values() if template is not None and dialect.fits(template)), None)
