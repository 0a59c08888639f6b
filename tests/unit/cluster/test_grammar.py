"""Grammars as masks over a byte-level model's tokens."""

import json
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from random import Random
from threading import Event

import numpy as np
import pytest
import tokenizers

from cluster.grammar import Grammars, lark_of
from cluster.spec.errors import UserError
from cluster.tokenizer import Tokenizer
from tests.fakes.model_folder import BOS, EOS, VOCAB_SIZE, write_model_folder

WAIT_S = 30.0


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Iterator[Grammars]:
    grammars = Grammars(folder, VOCAB_SIZE + 40)
    yield grammars
    grammars.close()


def ids(mask: np.ndarray) -> list[int]:
    return [int(token_id) for token_id in np.flatnonzero(mask)]


def test_a_text_is_followed_to_its_end(grammars: Grammars) -> None:
    matcher = grammars.matcher(lark('start: "ab" | "abc"'))
    assert len(matcher.allowed()) == VOCAB_SIZE + 40
    assert ids(matcher.allowed()) == [ord("a")]
    matcher.advance(b"ab")
    assert ids(matcher.allowed()) == [ord("c")]
    assert (matcher.is_whole, matcher.is_over) == (True, False)
    matcher.advance(b"c")
    assert ids(matcher.allowed()) == []
    assert (matcher.is_whole, matcher.is_over, matcher.problem) == (True, True, "")


def test_a_model_with_fewer_tokens_than_its_tokenizer(folder: Path) -> None:
    grammars = Grammars(folder, 100)
    assert ids(grammars.matcher(lark('start: "a" | "z"')).allowed()) == [ord("a")]
    grammars.close()


def test_special_tokens_are_allowed_only_if_named(grammars: Grammars) -> None:
    assert {BOS, EOS}.isdisjoint(ids(grammars.matcher(lark("start: /(?s:.*)/")).allowed()))


def test_the_tokenizer_knows_which_added_tokens_must_be_named(tmp_path: Path) -> None:
    path = write_model_folder(tmp_path) / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    texts = ["<think>", "<|a b|>", "[CALL]", "<open", "close>"]
    tokenizer.add_tokens(texts)
    tokenizer.save(str(path))
    grammars = Grammars(tmp_path, VOCAB_SIZE + len(texts))
    free = ids(grammars.matcher(lark("start: /(?s:.*)/")).allowed())
    grammars.close()
    assert {text for text in texts if tokenizer.token_to_id(text) not in free} == {"<think>", "<|a b|>"}
    assert Tokenizer(tmp_path).whole_texts == {"<s>", "</s>", "<think>", "<|a b|>"}
    assert ids(grammars.matcher(lark('start: <s> "a"')).allowed()) == [BOS]


@pytest.mark.parametrize("endless", ["start: start", "start: /a[^\\x00-\\x{10ffff}]/"])
def test_unsatisfiable_grammars_are_refused_before_any_token(grammars: Grammars, endless: str) -> None:
    with pytest.raises(UserError, match=r"^no finite text matches it$"):
        grammars.matcher(lark(endless))


def test_grammars_that_grow_too_large_are_refused_with_a_reason(grammars: Grammars) -> None:
    matcher = grammars.matcher(lark("start: " + " | ".join(f'"a{number}"' for number in range(3000))))
    matcher.advance(b"a")
    assert matcher.problem.startswith("it is too ambiguous")


def test_an_ambiguous_grammar_is_refused_before_its_tokens_take_long(grammars: Grammars) -> None:
    matcher = grammars.matcher(lark('start: a\na: "x" | a a | " " | /[a-z]/ a'))
    for _ in range(400):
        matcher.advance(b"a")
        matcher.allowed()
    assert matcher.problem.startswith("it is too ambiguous")


def test_regular_expressions_that_grow_too_large_are_refused_with_a_reason(grammars: Grammars) -> None:
    forms = "|".join(f"(.|\\n)*{letter}(.|\\n){{16}}q" for letter in "abcdefgh")
    matcher, generator = grammars.matcher(lark(f"start: /({forms})*/")), Random(0)
    for _ in range(6000):
        matcher.advance([generator.choice(b"abcdefghijklmnopqz")])
        matcher.allowed()
    assert matcher.problem == "its regular expressions have too many states; use simpler ones"


def test_a_schema_with_many_optional_properties_is_followed(grammars: Grammars) -> None:
    properties = {f"p{number}": {"type": "string"} for number in range(200)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    matcher = grammars.matcher(json.dumps({"grammars": [{"json_schema": schema}]}))
    matcher.advance(b'{"p199"')
    assert ord(":") in ids(matcher.allowed())


def test_a_token_that_does_not_fit_is_a_problem(grammars: Grammars) -> None:
    matcher = grammars.matcher(lark('start: "ab"'))
    matcher.advance(b"x")
    assert "\n" not in matcher.problem
    assert "doesn't satisfy the grammar" in matcher.problem


def test_each_text_is_compiled_once_and_followed_apart(grammars: Grammars) -> None:
    text = lark('start: "once" /x*/')
    assert grammars.prepare(text) is grammars.prepare(text)
    one, other = (grammars.matcher(text) for _ in range(2))
    one.advance(b"on")
    assert (ids(one.allowed()), ids(other.allowed())) == ([ord("c")], [ord("o")])


def test_the_least_recently_used_is_forgotten_unless_somebody_holds_it(grammars: Grammars) -> None:
    texts = [lark(f'start: "{number}"') for number in range(33)]
    grammars.prepare(texts[0]).result()
    held, *_, last = [grammars.prepare(text) for text in texts[1:]]
    grammars.prepare(lark('start: "one more"')).result()
    assert texts[0] not in grammars._alive
    assert grammars.prepare(texts[1]) is held
    assert grammars.prepare(texts[-1]) is last


def test_a_grammar_that_is_compiled_again_does_not_wait_behind_others(grammars: Grammars) -> None:
    """Otherwise, all requests of a step would wait."""
    begun, goes_on = Event(), Event()

    def work() -> None:
        begun.set()
        goes_on.wait(WAIT_S)

    busy = grammars._thread.submit(work)
    assert begun.wait(WAIT_S)
    try:
        waiting = grammars.prepare(text := lark('start: "first" | "last"'))
        assert ids(grammars.matcher(text).allowed()) == [ord("f"), ord("l")]
        assert waiting.cancelled()
        assert grammars.prepare(text).done()
        assert not busy.done()
    finally:
        goes_on.set()


def test_tenants_take_turns(grammars: Grammars) -> None:
    begun, goes_on, done = Event(), Event(), list[str]()

    def work() -> None:
        begun.set()
        goes_on.wait(WAIT_S)

    grammars._thread.submit(work)
    assert begun.wait(WAIT_S)
    futures = []
    for name in ("mallory 1", "mallory 2", "mallory 3", "alice 1", "bob 1", "alice 2"):
        future = grammars.prepare(lark(f'start: "turns of {name}"'), name.partition(" ")[0])
        future.add_done_callback(lambda _, name=name: done.append(name))  # type: ignore[misc]
        futures.append(future)
    goes_on.set()
    wait(futures, WAIT_S)
    grammars._thread.submit(lambda: None).result()  # the last callback comes after its future
    assert done == ["mallory 1", "alice 1", "bob 1", "mallory 2", "alice 2", "mallory 3"]


def test_memory_is_limited_by_the_time_that_grammars_took(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.grammar.compile_s", lambda _: 0.3)
    for number in range(9):
        grammars.prepare(lark(f'start: "limited" "{number}"'))
    assert len(grammars._recent) == 3


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (lark("start: /a(?=b)/"), "look-around"),
        (lark("start: nothing"), "nothing"),
        (json.dumps({"grammars": [{"json_schema": {"type": "objec"}}]}), "Invalid type: objec"),
        ("nonsense", "Expected"),
    ],
)
def test_unusable_grammars_are_refused_in_one_line(grammars: Grammars, grammar: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        grammars.matcher(grammar)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    grammars = Grammars(tmp_path, 256)
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        grammars.matcher(lark('start: "a"'))
    grammars.close()


def test_a_tokenizer_with_gaps(tmp_path: Path) -> None:
    gapped = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 2}, merges=[]))
    gapped.save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars(tmp_path, 3)
    with pytest.raises(UserError, match="this model's tokenizer does not support grammars: its token ids have gaps"):
        grammars.matcher(lark('start: "a"'))
    grammars.close()


def test_either_notation_of_a_grammar() -> None:
    assert lark_of('start: "a"') == 'start: "a"'
    assert "start" in lark_of('root ::= "yes" | "no"')
    with pytest.raises(UserError, match="Expected ::="):
        lark_of("no grammar")
