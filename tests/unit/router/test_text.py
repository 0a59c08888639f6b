"""Stop strings never leak, and text does not depend on how tokens are batched."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.sampling import FinishReason
from cluster.spec.wire import TokenIds
from cluster.tokenizer import Tokenizer
from router.text import AnswerText, MarkerScanner, OutputChunk, TextRules, token_bytes, token_text
from tests.fakes.model_folder import BOS, EOS, write_model_folder, write_sentence_piece
from tests.fakes.replica import logprobs_of


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model_folder(tmp_path_factory.mktemp("model")))


def truncate(text: str, stops: list[str]) -> str:
    """Find by brute force the text before the stop string that completes first, or the longest of several."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end - max(map(len, matching))]
    return text


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *[point % (len(text) + 1) for point in cuts]})
    return [text[start:end] for start, end in pairwise(edges)]


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30)),
)
def test_scanner_equals_brute_force(text: str, stops: list[str], cuts: list[int]) -> None:
    scanner, shown = MarkerScanner(*stops), ""
    for piece in pieces_of(text, cuts):
        shown += scanner.push(piece)[0]
        assert truncate(text, stops).startswith(shown), "shown text is never taken back"
        if scanner.hit:
            break
    shown += scanner.flush()
    assert shown == truncate(text, stops)
    assert (scanner.hit is not None) == any(stop in text for stop in stops)
    assert scanner.hit is None or (scanner.hit in stops and text.startswith(shown + scanner.hit))


def test_text_that_cannot_become_a_stop_string_is_not_held_back() -> None:
    scanner = MarkerScanner("stop")
    assert scanner.push("a s")[0] == "a "
    assert scanner.push("o")[0] == "so"
    assert scanner.push("sto")[0] == ""
    assert scanner.flush() == "sto"


def answer(tokenizer: Tokenizer, *stops: str) -> AnswerText:
    return AnswerText(tokenizer, TextRules(stops=stops, stop_token_ids=frozenset({EOS, 46})))


@given(
    text=st.text("abc", max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
    min_tokens=st.integers(0, 14),
    cuts=st.lists(st.integers(0, 12)),
)
def test_stop_strings_count_only_after_the_minimum(
    tokenizer: Tokenizer, text: str, stops: list[str], min_tokens: int, cuts: list[int]
) -> None:
    start = max(min_tokens - 1, 0)
    shown: list[OutputChunk] = []
    made = AnswerText(tokenizer, TextRules(stops=stops, min_tokens=min_tokens))
    for part in pieces_of(text, cuts):
        shown += made.push(list(part.encode()), None)
        if shown[-1].finish:
            break
    else:
        shown += made.push([], FinishReason.LENGTH)
    assert text_of(shown) == text[:start] + truncate(text[start:], stops)


@given(
    text=st.text("aé€😀", max_size=12),
    stops=st.lists(st.text("aé€😀", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 48)),
    include=st.booleans(),
)
def test_characters_and_stop_strings_may_be_split_over_tokens_in_any_way(
    tokenizer: Tokenizer, text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    """Each token is a byte."""
    tokens = list(text.encode())
    edges = sorted({0, len(tokens), *[point % (len(tokens) + 1) for point in cuts]})
    made, shown = AnswerText(tokenizer, TextRules(stops=stops, include_stop=include)), list[OutputChunk]()
    for start, end in pairwise(edges):
        shown += made.push(tokens[start:end], None)
        if shown[-1].finish:
            break
    else:
        shown += made.push([], FinishReason.LENGTH)
    is_stopped = any(stop in text for stop in stops)
    assert shown[-1].finish is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
    ends = [
        len(truncate(text, stops)) + len(stop) for stop in stops if text[len(truncate(text, stops)) :].startswith(stop)
    ]
    assert text_of(shown) == (text[: min(ends)] if include and is_stopped else truncate(text, stops))


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abcd")])
def test_the_stop_string_is_included_on_request(tokenizer: Tokenizer, include: bool, text: str) -> None:
    by_string = AnswerText(tokenizer, TextRules(stops=["cd"], include_stop=include))
    assert joined(by_string.push(list(b"abcde"), None)) == (text, FinishReason.STOP)
    by_token = AnswerText(tokenizer, TextRules(stop_token_ids=frozenset({100}), include_stop=include))
    assert text_of(by_token.push(list(b"abd"), FinishReason.STOP)) == ("abd" if include else "ab")


def test_special_tokens_are_shown_on_request(tokenizer: Tokenizer) -> None:
    tokens = [97, EOS, 98]
    assert text_of(AnswerText(tokenizer, TextRules()).push(tokens, FinishReason.LENGTH)) == "ab"
    shown = AnswerText(tokenizer, TextRules(skip_special_tokens=False)).push(tokens, FinishReason.LENGTH)
    assert text_of(shown) == "a</s>b"


def test_offsets_and_logprobs_belong_to_their_tokens(tokenizer: Tokenizer) -> None:
    tokens = [*"a€b".encode()]
    logprobs = [logprobs_of(token_id, 2) for token_id in tokens]
    chunks = AnswerText(tokenizer, TextRules(stops=["bX"])).push(tokens, FinishReason.LENGTH, logprobs)
    assert offsets_of(chunks) == (0, 1, 1, 1, 2)
    assert [given for chunk in chunks for given in chunk.logprobs] == logprobs


@pytest.mark.parametrize(
    ("tokens", "text", "offsets"),
    [
        (b"\xe2+l\xe2", "\ufffd+l\ufffd", (0, 1, 2, 3)),
        (b"\xe2\xe2\x82\xacx", "\ufffd\u20acx", (0, 1, 1, 1, 2)),
        (b"a\xe2\x82+", "a\ufffd+", (0, 1, 1, 2)),
        (b"\xe2\xf0\x9f\x98\x80", "\ufffd\U0001f600", (0, 1, 1, 1, 1)),
    ],
)
def test_offsets_next_to_invalid_characters(
    tokenizer: Tokenizer, tokens: bytes, text: str, offsets: tuple[int, ...]
) -> None:
    chunks = AnswerText(tokenizer, TextRules()).push([*tokens], FinishReason.LENGTH)
    assert (text_of(chunks), offsets_of(chunks)) == (text, offsets)


def text_of(chunks: list[OutputChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def offsets_of(chunks: list[OutputChunk]) -> tuple[int, ...]:
    return tuple(offset for chunk in chunks for offset in chunk.offsets)


def joined(pieces: list[OutputChunk]) -> tuple[str, FinishReason | None]:
    """Return the joined text and the finish reason of the last piece. No other piece may have one."""
    assert not any(piece.finish for piece in pieces[:-1])
    return text_of(pieces), pieces[-1].finish


def test_the_stopping_token_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    text = answer(tokenizer)
    pieces = text.push([97, 46], FinishReason.STOP)
    assert joined(pieces) == ("a", FinishReason.STOP)
    assert [token_id for piece in pieces for token_id in piece.token_ids] == [97, 46]


def test_a_stop_token_in_the_middle_or_at_the_length_limit_is_shown(tokenizer: Tokenizer) -> None:
    assert joined(answer(tokenizer).push([97, 46], FinishReason.LENGTH))[0] == "a."


def test_tokens_after_a_stop_string_are_dropped(tokenizer: Tokenizer) -> None:
    text = answer(tokenizer, "cd")
    assert joined(text.push(list(b"abc"), None)) == ("ab", None)
    assert text.push(list(b"defg"), None) == [
        OutputChunk(token_ids=(100,), finish=FinishReason.STOP, offsets=(3,), stopped_by="cd")
    ]


def test_a_partial_stop_string_and_character_are_flushed_at_the_end(tokenizer: Tokenizer) -> None:
    text = answer(tokenizer, "bX")
    assert joined(text.push([*b"ab", 0xE2], None)) == ("a", None)
    assert joined(text.push([0x82], FinishReason.LENGTH)) == ("b\ufffd", FinishReason.LENGTH)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_sentence_piece(tmp_path_factory.mktemp("model")))


@given(text=st.text(max_size=12))
def test_bytes_of_all_tokens_are_the_texts(byte_level: Tokenizer, text: str) -> None:
    tokens = byte_level.encode(text, add_special_tokens=False)
    assert b"".join(token_bytes(byte_level, token_id) for token_id in tokens) == text.encode()


def test_special_tokens_and_ids_without_a_token(byte_level: Tokenizer) -> None:
    assert (token_text(byte_level, BOS), token_bytes(byte_level, BOS)) == ("<s>", b"<s>")
    assert (token_text(byte_level, 5000), token_bytes(byte_level, 5000)) == ("", b"")


@pytest.mark.parametrize("prompt", ["cat", "the cat", " ", "the \u20ac"])
@pytest.mark.parametrize("words", [[258], [260, 259, 258], [257, 257, 259], [260]], ids=str)
def test_a_completion_keeps_the_space_at_its_start(sentence_piece: Tokenizer, prompt: str, words: list[int]) -> None:
    prompt_ids = TokenIds.of(sentence_piece.encode(prompt, add_special_tokens=False))
    made = AnswerText(sentence_piece, TextRules(continues_prompt=True), prompt_ids=prompt_ids)
    text = text_of([*made.push(words, None), *made.push([], FinishReason.LENGTH)])
    assert prompt + text == sentence_piece.decode([*prompt_ids, *words])
    assert text.encode() == b"".join(token_bytes(sentence_piece, token_id) for token_id in words)


def test_a_chats_answer_is_a_text_of_its_own(sentence_piece: Tokenizer) -> None:
    made = AnswerText(sentence_piece, TextRules(), prompt_ids=[259])
    assert text_of(made.push([258, 258], FinishReason.LENGTH)) == "the the"


@given(prompt=st.lists(st.integers(0, 255), max_size=20), ids=st.lists(st.integers(0, 255), max_size=12))
def test_the_text_of_bytes_does_not_depend_on_the_prompt(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int]
) -> None:
    made = AnswerText(tokenizer, TextRules(continues_prompt=True), prompt_ids=prompt)
    assert text_of([*made.push(ids, None), *made.push([], FinishReason.LENGTH)]) == tokenizer.decode(ids)


def test_sentence_piece(sentence_piece: Tokenizer) -> None:
    assert [token_text(sentence_piece, token_id) for token_id in (257, 258, 259, 260)] == [" ", " the", "cat", "  "]
    assert [token_bytes(sentence_piece, token_id) for token_id in (258, 260)] == [b" the", b"  "]
    tokens = sentence_piece.encode("\u20ac", add_special_tokens=False)
    assert b"".join(token_bytes(sentence_piece, token_id) for token_id in tokens).decode() == " \u20ac"
