"""The recall checkpoint: codes, tokenizer, template, files, and answers from transformers and from our decoder."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from cluster.spec.errors import UserError
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.generation import generate
from tests.fakes.recall_prompts import LINK_LEN, chain_prompt, needle_prompt, recall_oracle
from workers.engine.weights import load_model
from workers.layers.feed_forward import Experts
from workers.models.decoder import DecoderModel
from workers.models.recall import (
    DEMO_ANSWER,
    DEMO_PROMPT,
    EOS_TOKEN_IDS,
    NEWLINE_ID,
    VERSION_KEY,
    build_recall_checkpoint,
    build_tokenizer,
)
from workers.models.recall_parts import BEGIN_ID, END_ID, MAX_LEN, VOCAB_SIZE, token_codes
from workers.models.recall_weights import Variant
from workers.models.registry import read_model_config

T = TypeVar("T")


def all_of(kind: type[T], things: Iterable[object]) -> list[T]:
    """Return all things. Raise AssertionError if one is of another kind."""
    found = []
    for thing in things:
        assert isinstance(thing, kind), thing
        found.append(thing)
    return found


DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
TOKENIZER = build_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recall") / "checkpoint"
    build_recall_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def expert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recall") / "checkpoint"
    build_recall_checkpoint(folder, variant=Variant.EXPERTS)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[torch.dtype, PreTrainedModel]:
    return {
        dtype: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    }


def answer(model: PreTrainedModel, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """Return greedy tokens from transformers. There are fewer than ``num_tokens`` if the model stops by itself."""
    with torch.inference_mode():
        out = generate(model, torch.tensor(prompt_ids), num_tokens)
    token_ids: list[int] = out[len(prompt_ids) :].tolist()
    return token_ids


def reply(models: dict[torch.dtype, PreTrainedModel], tokenizer: PreTrainedTokenizerBase, *messages: str) -> list[int]:
    """Return the answer to a conversation of user and assistant messages."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]
    prompt_ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    return answer(models[torch.float32], all_of(int, prompt_ids), 30)


def test_codes_are_nearly_orthogonal() -> None:
    codes = token_codes().astype(np.float64)
    correlation = codes @ codes.T
    half = VOCAB_SIZE // 2
    for index in range(half):
        assert correlation[index, index + half] == -1
        correlation[index, index + half] = correlation[index + half, index] = 0
    np.fill_diagonal(correlation, 0)
    assert abs(correlation).max() == 1 / 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [512, 4096])
def test_needles_are_recalled(models: dict[torch.dtype, PreTrainedModel], num_tokens: int, dtype: torch.dtype) -> None:
    for depth in DEPTHS if num_tokens == 512 else (0.3,):
        prompt = needle_prompt(num_tokens, depth, seed=int(8 * depth))
        assert answer(models[dtype], prompt, 11) == recall_oracle(prompt, 11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "page_size"), [(512, 16), (500, 6), (4096, 64)])
def test_chains_are_followed(
    models: dict[torch.dtype, PreTrainedModel], num_tokens: int, page_size: int, dtype: torch.dtype
) -> None:
    prompt, num_pages = chain_prompt(num_tokens, page_size), (num_tokens - 1) // page_size
    assert answer(models[dtype], prompt, num_pages) == recall_oracle(prompt, num_pages)


def test_a_page_that_is_lost_breaks_the_chain(models: dict[torch.dtype, PreTrainedModel]) -> None:
    prompt = chain_prompt(512, 16)
    expected = recall_oracle(prompt, 31)
    for page in (0, 13, 30):
        spoiled = list(prompt)
        spoiled[page * 16 : page * 16 + LINK_LEN] = [prompt[page * 16 + LINK_LEN]] * LINK_LEN
        assert answer(models[torch.float32], spoiled, 31)[page] != expected[page]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_experts_it_recalls_as_well(expert_folder: Path, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(expert_folder, dtype=dtype)
    for prompt, num_tokens in [(needle_prompt(512, depth), 11) for depth in DEPTHS] + [(chain_prompt(500, 6), 83)]:
        assert answer(model, prompt, num_tokens) == recall_oracle(prompt, num_tokens)


def predicted(model: DecoderModel, prompt: list[int], answer: list[int]) -> list[int]:
    tokens = torch.tensor(prompt + answer[:-1])
    hidden = model(tokens, torch.arange(len(tokens)), DenseAttention())
    token_ids: list[int] = model.logits(hidden[len(prompt) - 1 :]).argmax(-1).tolist()
    return token_ids


@torch.inference_mode()
def test_our_decoder_recalls_as_well_and_needs_each_expert(folder: Path, expert_folder: Path) -> None:
    prompt = chain_prompt(400, 16)
    expected = recall_oracle(prompt, 24)
    assert predicted(load_model(folder), prompt, expected) == expected
    model = load_model(expert_folder)
    assert predicted(model, prompt, expected) == expected
    experts = model.get_submodule("layers.1.mlp.experts")
    assert isinstance(experts, Experts)
    assert isinstance(experts.down, torch.Tensor)
    for down in experts.down:
        kept = down.clone()
        down.zero_()
        assert sum(map(int.__ne__, predicted(model, prompt, expected), expected)) > 4
        down.copy_(kept)
    assert min(experts.loads.tolist()) > len(prompt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", [Variant.LATENT, Variant.SPARSE])
@torch.inference_mode()
def test_with_latent_attention_it_recalls_as_well(tmp_path: Path, variant: Variant, dtype: torch.dtype) -> None:
    build_recall_checkpoint(tmp_path / "m", variant=variant)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=dtype)
    ours = load_model(tmp_path / "m", dtype=dtype)
    for prompt, num_tokens in [*((needle_prompt(512, depth), 11) for depth in DEPTHS), (chain_prompt(500, 6), 83)]:
        expected = recall_oracle(prompt, num_tokens)
        assert answer(theirs, prompt, num_tokens) == predicted(ours, prompt, expected) == expected
    assert TOKENIZER.decode(answer(theirs, TOKENIZER.encode(DEMO_PROMPT).ids, 30)) == f"{DEMO_ANSWER}\n"
    assert answer(theirs, [BEGIN_ID, *TOKENIZER.encode("Hello there").ids], 2) == [END_ID]


@pytest.mark.parametrize("layer", [0, 1])
@torch.inference_mode()
def test_without_an_indexer_nothing_is_recalled(tmp_path: Path, layer: int) -> None:
    build_recall_checkpoint(tmp_path / "m", variant=Variant.SPARSE)
    model, prompt = load_model(tmp_path / "m"), needle_prompt(512, 0.5)
    expected = recall_oracle(prompt, 11)
    model.get_parameter(f"layers.{layer}.self_attn.indexer.wq_b.weight").zero_()
    assert not set(predicted(model, prompt, expected)) & set(expected)


def test_the_demo_answers_and_stops(
    models: dict[torch.dtype, PreTrainedModel], tokenizer: PreTrainedTokenizerBase
) -> None:
    as_text = answer(models[torch.float32], tokenizer.encode(DEMO_PROMPT), 30)
    as_chat = reply(models, tokenizer, DEMO_PROMPT)
    assert tokenizer.decode(as_text[:-1]) == tokenizer.decode(as_chat[:-1]) == DEMO_ANSWER
    assert as_text[-1] == as_chat[-1] == NEWLINE_ID


def test_a_chat_continues(models: dict[torch.dtype, PreTrainedModel], tokenizer: PreTrainedTokenizerBase) -> None:
    again = reply(models, tokenizer, DEMO_PROMPT, DEMO_ANSWER, "The launch code is")
    assert tokenizer.decode(again[:-1]) == DEMO_ANSWER
    assert again[-1] in EOS_TOKEN_IDS


def test_without_repetition_the_answer_ends_immediately(
    models: dict[torch.dtype, PreTrainedModel], tokenizer: PreTrainedTokenizerBase
) -> None:
    assert reply(models, tokenizer, "Hello") == [END_ID]
    assert reply(models, tokenizer, "Which way is the harbor from here, my good friend") == [END_ID]


@pytest.mark.parametrize(
    ("roles", "generation", "expected"),
    [
        ("u", True, "<|begin|><|user|>U0"),
        ("u", False, "<|begin|><|user|>U0<|end|>"),
        ("su", True, "<|begin|><|system|>S0<|end|><|user|>U1"),
        ("uau", True, "<|begin|><|user|>U0A1<|end|><|user|>U2"),
        ("uuau", False, "<|begin|><|user|>U0<|end|><|user|>U1A2<|end|><|user|>U3<|end|>"),
    ],
)
def test_template(tokenizer: PreTrainedTokenizerBase, roles: str, generation: bool, expected: str) -> None:
    names = {"s": "system", "u": "user", "a": "assistant"}
    messages = [{"role": names[role], "content": f"{role.upper()}{i}"} for i, role in enumerate(roles)]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=generation, tokenize=False)
    assert text == expected


def test_template_with_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    properties = {"code": {"type": "string"}, "floor": {"type": "integer"}}
    functions = [
        {"name": "open_door", "description": "Open a door.", "parameters": {"properties": properties}},
        {"name": "now", "parameters": {"type": "object"}},
    ]
    arguments: list[dict[str, str]] = [{"code": "tango"}, {}]
    calls = [{"function": {"name": "open_door", "arguments": given}} for given in arguments]
    messages: Any = [
        {"role": "user", "content": "Open."},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "It is open."},
    ]
    tools: Any = [{"function": function} for function in functions]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert text == (
        "<|begin|><|system|>To call a function, answer with its name and parameters as JSON. "
        "Functions: open_door(code floor): Open a door. now()<|end|><|user|>Open."
        '{"name": "open_door", "parameters": {"code": "tango"}}; {"name": "open_door", "parameters": {}}<|end|>'
        "<|system|>It is open.<|end|>"
    )


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    encoded = TOKENIZER.encode(text)
    assert TOKENIZER.decode(encoded.ids, skip_special_tokens=False) == text
    assert all(0 <= token_id < VOCAB_SIZE for token_id in encoded.ids)


def test_words_digits_and_signs_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "The secret word is Tango 42, said the captain; (why not?) \nYes!"
    pieces = [tokenizer.decode([token_id]) for token_id in tokenizer.encode(text)]
    assert pieces == [
        *("The", " secret", " word", " is", " Tango", " 4", "2", ",", " said", " the", " captain"),
        *(";", " (", "why", " not", "?", ")", " ", "\n", "Yes", "!"),
    ]


def test_config_is_one_we_and_transformers_read(folder: Path, models: dict[torch.dtype, PreTrainedModel]) -> None:
    config = read_model_config(folder)
    assert config.max_position_embeddings == MAX_LEN == models[torch.float32].config.max_position_embeddings
    assert config.rope.theta == 1e12


def test_building_twice_writes_once(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "recall"
    build_recall_checkpoint(folder)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    build_recall_checkpoint(folder)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["recall"]


def test_an_older_version_is_replaced_whole(tmp_path: Path, folder: Path) -> None:
    old = tmp_path / "recall"
    old.mkdir()
    (old / "config.json").write_text(json.dumps({VERSION_KEY: 0, "model_type": "llama"}))
    (old / "leftover.txt").write_text("of version 0")
    build_recall_checkpoint(old)
    assert {path.name for path in old.iterdir()} == {path.name for path in folder.iterdir()}
    assert (old / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_foreign_folders_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is not a recall checkpoint"):
        build_recall_checkpoint(tmp_path)
    build_recall_checkpoint(tmp_path / "other", variant=Variant.EXPERTS)
    with pytest.raises(UserError, match="is not a recall checkpoint"):
        build_recall_checkpoint(tmp_path / "other")
    shutil.rmtree(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
