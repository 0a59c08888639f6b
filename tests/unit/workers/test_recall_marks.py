"""Marks of the recall models: never in a prompt, always behind the end, and without effect on repetition."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fakes.dense_attention import DenseAttention
from tests.fakes.recall_prompts import needle_prompt, recall_oracle
from workers.engine.weights import load_model
from workers.models.recall import DEMO_PROMPT, build_recall_checkpoint, build_tokenizer
from workers.models.recall_marks import MARK_LEVELS
from workers.models.recall_parts import BEGIN_ID, END_ID, VOCAB_SIZE
from workers.models.recall_weights import Variant

TOKENIZER = build_tokenizer()
MARK_IDS = range(VOCAB_SIZE, VOCAB_SIZE + len(MARK_LEVELS))
AMBIGUOUS = 'a, b, a. a: a; a ") a ( a - a [ a ] a { a } a "a" a'
TEXTS = ("Hello", DEMO_PROMPT, AMBIGUOUS, '{"city": "Rome", "age": 10, "tags": [10, 10\n]\n}')


def test_texts_have_no_marks() -> None:
    for mark, mark_id in zip(MARK_LEVELS, MARK_IDS, strict=True):
        assert TOKENIZER.decode([mark_id]) == mark
        for text in (mark, f"a{mark}b", f" {mark} "):
            assert set(MARK_IDS).isdisjoint(TOKENIZER.encode(text).ids)


@pytest.fixture(scope="module", params=list(Variant))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("recall") / request.param
    build_recall_checkpoint(folder, variant=request.param)
    return folder


@torch.inference_mode()
def test_the_end_is_always_ahead_of_marks(folder: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        for start in ([BEGIN_ID], []):
            for text in TEXTS:
                logits = model(torch.tensor([[*start, *TOKENIZER.encode(text).ids]])).logits[0]
                assert (logits[:, VOCAB_SIZE:].amax(-1) < logits[:, END_ID]).all()


@torch.inference_mode()
def test_sampled_text_without_a_match_ends(folder: Path) -> None:
    logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([[BEGIN_ID, *TOKENIZER.encode("Hello").ids]]))
    assert logits.logits[0, -1].softmax(-1)[END_ID] > 0.96


@torch.inference_mode()
def test_marks_repeat_nothing_and_are_not_repeated(folder: Path) -> None:
    """Nothing follows a mark, or a token that only marks followed, and our decoder agrees with transformers."""
    word = TOKENIZER.encode(" word").ids[0]
    prompt = [BEGIN_ID, *needle_prompt(256, 0.5)]
    expected = recall_oracle(prompt, 3)
    assert word not in prompt
    marks = list(MARK_IDS)
    tokens = torch.tensor([*prompt, *marks, *marks, word, marks[0], word, prompt[-1], *expected[:-1]])
    theirs = AutoModelForCausalLM.from_pretrained(folder)(tokens[None]).logits[0]
    ours = (model := load_model(folder)).logits(model(tokens, torch.arange(len(tokens)), DenseAttention()))
    assert torch.allclose(ours.float(), theirs, atol=1e-3)
    assert theirs[-len(expected) :].argmax(-1).tolist() == expected
    assert set(theirs[len(prompt) : -len(expected)].argmax(-1).tolist()) == {END_ID}
