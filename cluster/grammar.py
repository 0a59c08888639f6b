"""Grammars that a text must follow, as masks over one model's tokens; the only file that imports llguidance.

A grammar travels as one text: JSON in llguidance's form, made by ``router.constraints``.
"""

import functools
import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import llguidance
import numpy as np
import tokenizers
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from cluster.spec.errors import UserError

_END = "<|baton: end of text|>"
"""Stands for the end in llguidance; never drawn."""

_MAX_COMPILED = 64
"""Grammars that are kept; the least recently used one goes first."""

_MAX_FORMAT_CHARS = 64
"""No known format has a longer name; what clients send is not kept beyond it."""

_WORDS = {
    ("NoExtensionBias",): "no text can follow it to its end",
    ("Too many items", "Current row has"): "it has too many ways to go on from one place; write fewer, or longer, "
    "alternatives, and repeat from the left",
}
"""By what llguidance says of its own parts, what it means."""


class Matcher:
    """How far one text has come in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, end_id: int) -> None:
        """end_id: stands for the end of the text, and is no token of the model."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_id = end_id

    @property
    def is_whole(self) -> bool:
        """The text may end here."""
        return self._matcher.is_accepting()

    @property
    def is_over(self) -> bool:
        """Nothing can follow: the text is whole, or there is a problem."""
        return self._matcher.is_stopped()

    @property
    def problem(self) -> str:
        """Why the text cannot go on, in one line; empty when all is well."""
        return _in_words(self._matcher.get_error())

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens can come next ``[vocab_size]``; those that only end a text are not told."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)
        allowed[self._end_id :] = False
        return allowed

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens came; one that the grammar does not allow is a problem."""
        self._matcher.consume_tokens(list(token_ids))


class Grammars:
    """Compiles grammars for one model, each once, on a thread of its own. Called from one thread."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Begin to read ``tokenizer.json``. vocab_size: ids below this are the model's."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="baton-grammars")
        self._tokens = self._thread.submit(_read_tokens, folder, vocab_size)
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[str, Future[llguidance.LLMatcher]] = OrderedDict()
        self.num_compiled = 0
        """Since the start."""

    def prepare(self, grammar: str) -> Future[llguidance.LLMatcher]:
        """Compile a grammar unless that was done; the future raises UserError when it cannot be used."""
        future = self._compiled.pop(grammar, None)
        if future is None:
            self.num_compiled += 1
            future = self._thread.submit(self._compile, grammar)
        self._compiled[grammar] = future
        if len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)
        return future

    def matcher(self, grammar: str) -> Matcher:
        """The start of a text; waits while the grammar is compiled.

        Raises:
            UserError: the grammar, or the model's tokenizer, cannot be used.
        """
        compiled = self.prepare(grammar).result()
        return Matcher(compiled.deep_copy(), self._vocab_size, self._tokens.result().eos_token)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokens.result(), grammar, log_level=0)
        # Some of what cannot be followed shows with the first token only.
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise UserError(_in_words(first.get_error()))
        return matcher


def knows_format(name: str) -> bool:
    """Texts of this format, as JSON Schemas name it, can be told from others."""
    return len(name) <= _MAX_FORMAT_CHARS and _takes_format(name)


def lark_of(text: str) -> str:
    """A grammar in Lark's syntax, from Lark's or GBNF's.

    Raises:
        UserError: it is neither.
    """
    try:
        return any_to_lark(text)
    except Exception as error:
        raise UserError(_in_one_line(str(error))) from error


def lark_of_regex(regex: str) -> str:
    """A grammar in Lark's syntax for the texts that match a regular expression, in Rust's syntax, as a whole."""
    written = llguidance.regex_to_lark(regex, use_ascii="").replace("\n", "\\n").replace("\r", "\\r")
    return f"start: /{written}/"


@functools.lru_cache
def _takes_format(name: str) -> bool:
    schema = {"type": "string", "format": name}
    return not llguidance.LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]}))


def _read_tokens(folder: Path, vocab_size: int) -> llguidance.LLTokenizer:
    """The tokenizer's tokens, one more that stands for the end of a text, and what the model has beyond these.

    Which of the model's tokens end a text differs with the request, so that llguidance is not told of them.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"model folder {folder} has no tokenizer.json")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        taken = set(tokenizer.get_vocab(with_added_tokens=True).values())
        tokenizer.add_special_tokens([_END])
        end = tokenizer.token_to_id(_END)
        if end is None or end in taken:
            raise ValueError(f"its token ids have gaps; {end} was to be free")
        return llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=max(end + 1, vocab_size), eos_token=end)
    except Exception as error:
        raise UserError(f"this model's tokenizer cannot follow a grammar: {_in_one_line(str(error))}") from error


def _in_words(error: str) -> str:
    """What llguidance says, for those who wrote the grammar; in one line."""
    known = (words for marks, words in _WORDS.items() if any(mark in error for mark in marks))
    return next(known, _in_one_line(error))


def _in_one_line(text: str) -> str:
    """What llguidance says, without the drawings and the state of its parser."""
    first, *others = text.splitlines() or [""]
    return " ".join([first.strip(), *(line for line in others if line.startswith("error: "))])
