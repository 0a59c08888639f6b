"""Tokenizers from a vocabulary of tiktoken: equal to joining the pair of lowest rank, one after another."""

import base64
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.grammar import Grammars
from cluster.spec.errors import UserError
from cluster.tokenizer import Tokenizer
from tests.fakes.model_folder import write_json, write_model_folder

JOINED = [b"aa", b"ab", b"ba", b"aaa", b" a", b"aba", b"\xc3\xa9", b"\xe4\xb8\xad", b"aab", b"abab", b"\n\n", b"bab"]
"""Tokens of several bytes, by rank, with several ways to join some of them."""
RANKS = {token: rank for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *JOINED])}
WORDS = [r" ?[^\s]+", r"\s+"]
CODE = rf"""
import tiktoken
class TikTokenTokenizer(PreTrainedTokenizer):
    num_reserved_special_tokens: int = 256
    pat_str = "|".join([r"{WORDS[0]}", r"{WORDS[1]}"])
    raise SystemExit("this code is not run")
"""
END, CALL = len(RANKS) + 1, len(RANKS) + 3
"""Ids of added tokens, with gaps before and between them."""


def write_folder(folder: Path) -> Path:
    write_model_folder(folder)
    (folder / "tokenizer.json").unlink()
    lines = (base64.b64encode(token) + f" {rank}\n".encode() for token, rank in RANKS.items())
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    (folder / "tokenization_kimi.py").write_text(CODE)
    added: dict[str, Any] = {
        str(END): {"content": "<|im_end|>", "special": True},
        str(CALL): {"content": "<|call|>", "special": False},
    }
    write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": added, "eos_token": "<|im_end|>"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def joined(word: bytes) -> list[int]:
    """Return the token ids of a word: of all pairs whose whole is a token, join the first of the lowest rank."""
    parts = [word[place : place + 1] for place in range(len(word))]
    while True:
        wholes = [(RANKS.get(left + right, len(RANKS)), at) for at, (left, right) in enumerate(pairwise(parts))]
        rank, at = min(wholes, default=(len(RANKS), 0))
        if rank == len(RANKS):
            return [RANKS[part] for part in parts]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@given(text=st.text("ab \n中é🙂", max_size=40))
def test_ids_are_those_of_the_lowest_ranks(tokenizer: Tokenizer, text: str) -> None:
    words = [word.encode() for word in re.findall("|".join(WORDS), text)]
    ids = tokenizer.encode(text)
    assert ids == [token_id for word in words for token_id in ([RANKS[word]] if word in RANKS else joined(word))]
    assert tokenizer.decode(ids) == text


def test_added_tokens_keep_their_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a<|call|>b<|im_end|>") == [RANKS[b"a"], CALL, RANKS[b"b"], END]
    assert tokenizer.decode([RANKS[b"a"], CALL, END]) == "a<|call|>"
    assert END in tokenizer.eos_ids
    assert tokenizer.token_of(END - 1) == f"<|reserved_token_{END - 1}|>"


def test_grammars_know_the_tokens(folder: Path, tokenizer: Tokenizer) -> None:
    grammars = Grammars(folder, CALL + 1)
    try:
        matcher = grammars.matcher(f'start: "ab中\\n" <[{CALL}]> "é"')
        for token_id in tokenizer.encode("ab中\n<|call|>é"):
            assert matcher.allowed()[token_id]
            assert not matcher.allowed()[RANKS[b"x"]]
            matcher.advance([token_id])
        assert matcher.is_over
    finally:
        grammars.close()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tiktoken.model", "IQ==\n", ["tiktoken.model is not a tokenizer"]),
        ("tiktoken.model", "version https://git-lfs.github.com/spec/v1\n", ["tiktoken.model is a pointer of Git LFS"]),
        ("tokenization_kimi.py", "pat_str = 5", ["no tokenization_*.py that assigns pat_str"]),
        ("tokenization_kimi.py", "class", ["no tokenization_*.py that assigns pat_str"]),
        ("tokenization_kimi.py", 'pat_str = "("', ["tiktoken.model is not a tokenizer"]),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', ["tiktoken.model is not a tokenizer"]),
    ],
)
def test_damaged_files_are_refused_in_one_line(tmp_path: Path, file: str, content: str, words: list[str]) -> None:
    folder = write_folder(tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(UserError) as caught:
        Tokenizer(folder)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
