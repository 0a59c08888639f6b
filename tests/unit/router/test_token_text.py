"""Tokens one by one as text and bytes, for the ways in which tokenizers write them."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, normalizers

from cluster.tokenizer import Tokenizer
from router.text import token_bytes, token_text
from tests.fakes.model_folder import BOS, write_model_folder


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Words begin with U+2581, and what the vocabulary lacks is written in bytes, as with Llama 2."""
    folder: Path = write_model_folder(tmp_path_factory.mktemp("model"))
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581the", "cat"]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: place for place, word in enumerate(words)}, [], byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@given(text=st.text(max_size=12))
def test_bytes_of_all_tokens_are_the_texts(byte_level: Tokenizer, text: str) -> None:
    tokens = byte_level.encode(text, add_special_tokens=False)
    assert b"".join(token_bytes(byte_level, token_id) for token_id in tokens) == text.encode()


def test_special_tokens_and_ids_without_a_token(byte_level: Tokenizer) -> None:
    assert (token_text(byte_level, BOS), token_bytes(byte_level, BOS)) == ("<s>", b"<s>")
    assert (token_text(byte_level, 5000), token_bytes(byte_level, 5000)) == ("", b"")


def test_sentence_piece(sentence_piece: Tokenizer) -> None:
    assert [token_text(sentence_piece, token_id) for token_id in (258, 259)] == [" the", "cat"]
    assert token_bytes(sentence_piece, 258) == b" the"
    tokens = sentence_piece.encode("\u20ac", add_special_tokens=False)
    assert b"".join(token_bytes(sentence_piece, token_id) for token_id in tokens).decode() == " \u20ac"
