"""Encoding and decoding of text: equal to transformers, without importing it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from cluster.spec.errors import UserError
from cluster.tokenizer import Detokenizer, Tokenizer
from tests.fakes.model_folder import BOS, EOS, TEMPLATE, VOCAB_SIZE, write_json, write_model_folder

MESSAGES = [{"role": "user", "content": "hi ünder"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model_folder(tmp_path_factory.mktemp("model")))


def test_facts_of_the_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == {EOS}
    assert tokenizer.max_context == 512
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_completions_begin_with_bos_and_chat_with_only_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("ab") == [BOS, 97, 98]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])
    assert tokenizer.encode(chat, add_special_tokens=False) == [BOS, *b"<user>ab\n<assistant>"]


def test_special_tokens_are_skipped_unless_wanted(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([BOS, 97, EOS]) == "a"
    assert tokenizer.decode([BOS, 97, EOS], skip_special_tokens=False) == "<s>a</s>"


@given(ids=st.lists(st.integers(0, 255), max_size=31))
def test_detokenizer_equals_decoding_at_once(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Any bytes, including invalid UTF-8."""
    detokenizer = Detokenizer(tokenizer)
    text = "".join([detokenizer.push(token_id) for token_id in ids]) + detokenizer.flush()
    assert text == tokenizer.decode(ids)


@pytest.fixture(scope="module")
def stripping(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer of bytes that drops a space at the start of a text, like Llama 2's."""
    folder = write_model_folder(tmp_path_factory.mktemp("model"))
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@given(prompt=st.text("a €🙂", max_size=12), answer=st.text("a €🙂", max_size=12))
def test_an_answer_continues_the_text_of_its_prompt(stripping: Tokenizer, prompt: str, answer: str) -> None:
    prompt_ids = [BOS, *prompt.encode()]
    detokenizer = Detokenizer(stripping, context=prompt_ids)
    text = "".join([detokenizer.push(token_id) for token_id in answer.encode()]) + detokenizer.flush()
    assert stripping.decode(prompt_ids) + text == stripping.decode([*prompt_ids, *answer.encode()])


def test_an_answer_may_follow_half_a_character(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, context=[97, 0xE2, 0x82])
    assert [detokenizer.push(token_id) for token_id in (0xAC, 98)] == ["", "\ufffdb"]


def test_no_half_character_is_shown(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(byte) for byte in "a€🙂".encode()] == ["a", "", "", "€", "", "", "", "🙂"]
    assert detokenizer.flush() == ""


def test_invalid_bytes_do_not_hold_text_back_forever(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    shown = "".join(detokenizer.push(0xFF) for _ in range(100))
    assert len(shown) > 60
    assert set(shown) == {"\ufffd"}
    assert shown + detokenizer.flush() == "\ufffd" * 100


def test_special_tokens_in_between_lose_nothing(stripping: Tokenizer) -> None:
    detokenizer = Detokenizer(stripping)
    ids = [97, *[EOS] * 70, 32, 98, EOS, 99]
    assert "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush() == "a bc"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 3}, {1, 2, EOS}),
        ({"eos_token_id": 4}, {}, {4, EOS}),
        ({}, {"eos_token_id": 3}, {3, EOS}),
        ({}, {"text_config": {"eos_token_id": [5]}}, {5, EOS}),
        ({}, {}, {EOS}),
    ],
)
def test_eos_ids(tmp_path: Path, generation: object, config: object, expected: set[int]) -> None:
    write_model_folder(tmp_path)
    write_json(tmp_path / "generation_config.json", generation)
    write_json(tmp_path / "config.json", config)
    assert Tokenizer(tmp_path).eos_ids == expected


class TestTemplates:
    def render(self, folder: Path, template: str, **variables: object) -> str:
        write_model_folder(folder)
        (folder / "chat_template.jinja").write_text(template)
        return Tokenizer(folder).apply_chat_template(MESSAGES, True, variables)

    def test_a_file_wins_over_the_configuration(self, tmp_path: Path) -> None:
        assert self.render(tmp_path, "{{ messages | length }}") == "2"

    def test_list_form(self, tmp_path: Path) -> None:
        write_model_folder(tmp_path)
        named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
        write_json(tmp_path / "tokenizer_config.json", {"chat_template": named})
        assert Tokenizer(tmp_path).apply_chat_template(MESSAGES) == "D"

    @pytest.mark.parametrize("in_files", [False, True])
    def test_conversations_with_tools_may_have_their_own(self, tmp_path: Path, in_files: bool) -> None:
        write_model_folder(tmp_path)
        templates = {"default": "D", "tool_use": "{{ tools | length }} tools", "rag": "{% broken"}
        if in_files:
            others = tmp_path / "additional_chat_templates"
            others.mkdir()
            for name, template in templates.items():
                path = tmp_path / "chat_template.jinja" if name == "default" else others / f"{name}.jinja"
                path.write_text(template)
        else:
            named = [{"name": name, "template": template} for name, template in templates.items()]
            write_json(tmp_path / "tokenizer_config.json", {"chat_template": named})
        tokenizer = Tokenizer(tmp_path)
        for tools, rendered in ((None, "D"), ([], "D"), ([{}, {}], "2 tools")):
            assert tokenizer.apply_chat_template(MESSAGES, variables={"tools": tools}) == rendered
        assert tokenizer.tool_template == templates["tool_use"]

    def test_helpers(self, tmp_path: Path) -> None:
        template = (
            "{{ messages[0] | tojson }}{{ strftime_now('%Y') | length }}{% if tools is none %}{{ extra }}{% endif %}"
        )
        assert self.render(tmp_path, template, extra="!") == '{"role": "user", "content": "hi ünder"}4!'

    def test_loop_controls_and_generation_blocks(self, tmp_path: Path) -> None:
        template = "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% break %}{% endfor %}"
        assert self.render(tmp_path, template) == "user"

    def test_a_template_may_refuse(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="rejects these messages: roles must alternate"):
            self.render(tmp_path, "{{ raise_exception('roles must alternate') }}")

    def test_conversations_may_be_nested_too_deeply(self, tmp_path: Path) -> None:
        arguments: list[Any] = []
        for _ in range(2000):
            arguments = [arguments]
        with pytest.raises(UserError, match="rejects these messages: maximum recursion depth"):
            self.render(tmp_path, "{{ arguments | tojson }}", arguments=arguments)

    def test_templates_are_sandboxed(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="unsafe"):
            self.render(tmp_path, "{{ ''.__class__.__mro__ }}")

    def test_a_broken_template_stops_the_start(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="chat template is not valid"):
            self.render(tmp_path, "{% for %}")

    @pytest.mark.parametrize(
        "given", [3, {"default": "D"}, [None], [{"name": "default"}], [{"name": 1, "template": 2}]]
    )
    def test_a_template_that_is_no_text_is_refused(self, tmp_path: Path, given: object) -> None:
        write_json(write_model_folder(tmp_path) / "tokenizer_config.json", {"chat_template": given})
        with pytest.raises(UserError, match=r": chat_template is .*; allowed: a text, or names with templates$"):
            Tokenizer(tmp_path)

    def test_no_template(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer(write_model_folder(tmp_path, template=None))
        with pytest.raises(UserError, match="this model has no chat template"):
            tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize("given", [5, ["</s>"], {}, {"content": None}])
def test_a_special_token_that_is_no_text_is_refused(tmp_path: Path, given: object) -> None:
    write_json(write_model_folder(tmp_path) / "tokenizer_config.json", {"eos_token": given})
    with pytest.raises(
        UserError, match=r"^eos_token in tokenizer_config\.json is .*; allowed: a text, or its content$"
    ):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("switches", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
def test_same_as_transformers(tmp_path: Path, switches: dict[str, bool]) -> None:
    from transformers import PreTrainedTokenizerFast

    write_model_folder(tmp_path)
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE, **switches}
    write_json(tmp_path / "tokenizer_config.json", config)
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(tmp_path), Tokenizer(tmp_path)
    for text in ("", "plain", "ünder €🙂", "<s>written out</s>"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    for add in (False, True):
        rendered = theirs.apply_chat_template(MESSAGES, add_generation_prompt=add, tokenize=False)
        assert ours.apply_chat_template(MESSAGES, add) == rendered


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "is not a tokenizer"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n", "`git lfs pull` fetches it"),
        ("config.json", "{", "is not valid JSON"),
        pytest.param("config.json", "[" * 100_000, "is not valid JSON", id="nested"),
        ("config.json", "[]", "must hold a JSON object, but holds a list"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    (write_model_folder(tmp_path) / name).write_text(content)
    with pytest.raises(UserError, match=message):
        Tokenizer(tmp_path)


def test_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        Tokenizer(tmp_path)


def test_router_and_tokenizer_import_neither_torch_nor_transformers() -> None:
    code = (
        "import json, sys, router.server, cluster.tokenizer;"
        "print(json.dumps([m for m in ('torch', 'transformers', 'ray') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
