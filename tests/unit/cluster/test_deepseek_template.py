"""Conversations of DeepSeek-V3.2, whose folder has no template."""

from pathlib import Path
from typing import Any

import pytest

from cluster.spec.errors import UserError
from cluster.tokenizer import Tokenizer
from tests.fakes.model_folder import write_json, write_model_folder

TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
SHOWN_TOOLS = 'Write <｜DSML｜function_calls> after </think>:\n{"name": "get", "parameters": {"type": "object"}}\n'
ENCODING = '''
raise SystemExit("this is not run")
OTHER = "other"
TOOLS_SYSTEM_TEMPLATE = """Write <{dsml_token}function_calls> after {thinking_end_token}:
{tool_schemas}
"""
'''
CALL = {"id": "a", "type": "function", "function": {"name": "get", "arguments": {"city": "Bern <>", "days": [1, "é"]}}}
INVOKED = (
    '<｜DSML｜invoke name="get">\n'
    '<｜DSML｜parameter name="city" string="true">Bern <></｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">[1, "é"]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
)
USER, SYSTEM = {"role": "user", "content": "hi"}, {"role": "system", "content": "Be brief."}
RESULT = {"role": "tool", "content": "rain"}


def shown(num_calls: int) -> str:
    return f"\n\n<｜DSML｜function_calls>\n{INVOKED * num_calls}</｜DSML｜function_calls>"


def said(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model_folder(tmp_path, template=None)
    write_json(tmp_path / "config.json", {"model_type": "deepseek_v32", "vocab_size": 258})
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding_dsv32.py").write_text(ENCODING, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("messages", "variables", "expected"),
    [
        ([USER], {}, "<｜User｜>hi<｜Assistant｜></think>"),
        ([USER], {"thinking": True}, "<｜User｜>hi<｜Assistant｜><think>"),
        ([USER], {"enable_thinking": True}, "<｜User｜>hi<｜Assistant｜><think>"),
        ([SYSTEM, USER], {"tools": TOOLS}, f"Be brief.\n\n{SHOWN_TOOLS}<｜User｜>hi<｜Assistant｜></think>"),
        ([USER], {"tools": TOOLS}, f"\n\n{SHOWN_TOOLS}<｜User｜>hi<｜Assistant｜></think>"),
        (
            [USER, said("yes", reasoning_content="so"), USER],
            {"thinking": True},
            "<｜User｜>hi<｜Assistant｜></think>yes</s><｜User｜>hi<｜Assistant｜><think>",
        ),
        (
            [USER, said("Let me see.", tool_calls=[CALL], reasoning_content="so"), RESULT],
            {"thinking": True},
            f"<｜User｜>hi<｜Assistant｜><think>so</think>Let me see.{shown(1)}</s>"
            "\n\n<function_results>\n<result>rain</result>\n</function_results>\n\n<think>",
        ),
        (
            [USER, said("", tool_calls=[CALL, CALL]), RESULT, RESULT, said("Rain."), USER],
            {},
            f"<｜User｜>hi<｜Assistant｜></think>{shown(2)}</s>"
            "\n\n<function_results>\n<result>rain</result>\n<result>rain</result>\n</function_results>\n\n</think>"
            "Rain.</s><｜User｜>hi<｜Assistant｜></think>",
        ),
    ],
)
def test_conversations(folder: Path, messages: list[dict[str, Any]], variables: dict[str, Any], expected: str) -> None:
    assert Tokenizer(folder).apply_chat_template(messages, True, variables) == f"<s>{expected}"


def test_without_a_prompt_for_the_answer(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.apply_chat_template([USER], False) == "<s><｜User｜>hi"
    text = tokenizer.apply_chat_template([USER, said("", tool_calls=[CALL]), RESULT], False)
    assert text.endswith("\n<result>rain</result>\n</function_results>")


def test_a_template_in_the_folder_wins(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("own", encoding="utf-8")
    assert Tokenizer(folder).apply_chat_template([USER]) == "own"


def test_tools_need_the_models_own_texts(folder: Path) -> None:
    path = folder / "encoding" / "encoding_dsv32.py"
    path.write_text("OTHER = 1", encoding="utf-8")
    with pytest.raises(UserError, match=r"encoding_dsv32\.py has no TOOLS_SYSTEM_TEMPLATE$"):
        Tokenizer(folder).apply_chat_template([USER], True, {"tools": TOOLS})
    path.unlink()
    with pytest.raises(UserError, match=r"tools need .*encoding_dsv32\.py, which DeepSeek's repository has$"):
        Tokenizer(folder).apply_chat_template([USER], True, {"tools": TOOLS})


def test_an_unknown_role_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="unknown role function"):
        Tokenizer(folder).apply_chat_template([{"role": "function", "content": "x"}])
