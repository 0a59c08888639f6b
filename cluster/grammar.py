"""Grammars for structured output, compiled to token masks for one model. The only file that imports llguidance.

A grammar is JSON in llguidance's format, made by ``router.preprocess.constrain``.
"""

import functools
import json
import os
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from threading import Lock, get_native_id
from typing import NamedTuple
from weakref import WeakValueDictionary

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from cluster.spec.errors import UserError
from cluster.tokenizer_file import load_tokenizer

_END = "<|baton: end of text|>"
"""End-of-text token that llguidance requires; never sampled."""

_MAX_COMPILED = 32
_MAX_COMPILED_S = 1.0
"""Maximum number of cached grammars, and maximum time that it took to compile them. The least recently used one is
evicted. A grammar that takes a second has about 100 MiB."""

_NICENESS = 5

_MAX_FORMAT_CHARS = 64
"""Maximum length of a format name: longer than any known name, so that long client input is never cached."""

_LIMITS = llguidance.LLParserLimits(step_max_items=1000, max_lexer_states=20_000)
"""Limits on the work for one token, some ten milliseconds, and on the memory of one grammar, 10 MiB.

All requests of a step wait for the slowest grammar, and each cached grammar keeps its states.
"""

_WORDS = {
    ("NoExtensionBias",): "no finite text matches it",
    ("too many states",): "its regular expressions have too many states; use simpler ones",
    ("symbols.len()",): "it has too many rules",
    ("Too many items", "Current row has"): "it is too ambiguous; use fewer or longer alternatives, and left recursion",
}
"""Explanations of problems, keyed by fragments of llguidance's messages."""


class Compiled(NamedTuple):
    """Grammar at the start of a text."""

    matcher: llguidance.LLMatcher
    seconds: float
    """Processor time that it took to compile."""


def compile_s(future: Future[Compiled]) -> float:
    """Return the processor time that a grammar took to compile; 0 if it is not compiled, or cannot be."""
    return future.result().seconds if future.done() and not future.cancelled() and not future.exception() else 0.0


class Matcher:
    """Progress of one generated text through its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, end_id: int) -> None:
        """Wrap a matcher; ``end_id`` marks the end of the text and is not a token of the model."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_id = end_id

    @property
    def is_whole(self) -> bool:
        """True if the text may end here."""
        return self._matcher.is_accepting()

    @property
    def is_over(self) -> bool:
        """True if nothing can follow, because the text is complete or there is a problem."""
        return self._matcher.is_stopped()

    @property
    def problem(self) -> str:
        """Reason why the text cannot continue; empty if it can."""
        return _in_words(self._matcher.get_error())

    def allowed(self) -> NDArray[np.bool_]:
        """Return a mask ``[vocab_size]`` of the tokens that may follow; tokens that only end a text are excluded."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)
        allowed[self._end_id :] = False
        return allowed

    def advance(self, token_ids: Sequence[int]) -> None:
        """Advance by generated tokens; a token that the grammar does not allow sets ``problem``."""
        self._matcher.consume_tokens(list(token_ids))


class Grammars:
    """Compiler and cache of one model's grammars. It compiles in a background thread, and is called from one thread."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Start reading the folder's tokenizer; the model's token ids are below ``vocab_size``."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="baton-grammars", initializer=_lower_priority)
        self._tokens = self._thread.submit(_read_tokens, folder, vocab_size)
        self._vocab_size = vocab_size
        self._recent: OrderedDict[str, Future[Compiled]] = OrderedDict()
        self._alive: WeakValueDictionary[str, Future[Compiled]] = WeakValueDictionary()
        """Recent grammars, and others whose future is still referenced."""
        self._lock = Lock()
        self._waiting: OrderedDict[str, deque[tuple[str, Future[Compiled]]]] = OrderedDict()
        """Grammars that wait to be compiled, by tenant. The first tenant is next."""

    def wait(self) -> None:
        """Wait until the tokenizer is read. Other threads can hardly run meanwhile."""
        wait([self._tokens])

    def prepare(self, grammar: str, tenant: str = "") -> Future[Compiled]:
        """Compile a grammar unless it is cached; the future raises UserError if it cannot be used.

        Tenants take turns. The grammar stays cached while the future is referenced.
        """
        future = self._alive.get(grammar)
        if future is None:
            future = Future()
            with self._lock:
                self._waiting.setdefault(tenant, deque()).append((grammar, future))
            self._thread.submit(self._compile_next)
        return self._keep(grammar, future)

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher at the start of a text. Compile the grammar first if it is not cached, ahead of others.

        Raises:
            UserError: the grammar, or the model's tokenizer, cannot be used.
        """
        future = self._alive.get(grammar)
        if future is None or future.cancel():  # it waits behind others
            future = Future()
            self._complete(future, grammar)
            self._keep(grammar, future)
        compiled = future.result().matcher
        return Matcher(compiled.deep_copy(), self._vocab_size, self._tokens.result().eos_token)

    def limited(self) -> AbstractContextManager[None]:
        """Return a context in which one request's grammars are converted and compiled. Subclasses limit its time."""
        return nullcontext()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _keep(self, grammar: str, future: Future[Compiled]) -> Future[Compiled]:
        """Cache a grammar as the most recently used one."""
        self._alive[grammar] = self._recent[grammar] = future
        self._recent.move_to_end(grammar)
        seconds = sum(map(compile_s, self._recent.values()))
        while len(self._recent) > _MAX_COMPILED or (seconds > _MAX_COMPILED_S and len(self._recent) > 1):
            _, evicted = self._recent.popitem(last=False)
            seconds -= compile_s(evicted)
        return future

    def _compile_next(self) -> None:
        with self._lock:
            tenant, waiting = self._waiting.popitem(last=False)
            grammar, future = waiting.popleft()
            if waiting:
                self._waiting[tenant] = waiting
        if future.set_running_or_notify_cancel():
            self._complete(future, grammar)

    def _complete(self, future: Future[Compiled], grammar: str) -> None:
        try:
            future.set_result(self._compile(grammar))
        except Exception as error:
            future.set_exception(error)

    def _compile(self, grammar: str) -> Compiled:
        tokens, begin_s = self._tokens.result(), time.thread_time()
        matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=_LIMITS)
        # Some errors appear only with the first token.
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise UserError(_in_words(first.get_error()))
        return Compiled(matcher, time.thread_time() - begin_s)


def _lower_priority() -> None:
    """Let the requests that run go on while grammars are compiled on a machine without free cores."""
    thread = get_native_id()
    with suppress(OSError):  # some systems have no priorities of threads
        os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), _NICENESS))


def knows_format(name: str) -> bool:
    """Return whether llguidance enforces this JSON Schema format."""
    return len(name) <= _MAX_FORMAT_CHARS and _takes_format(name)


def lark_of(text: str) -> str:
    """Convert a grammar from Lark or GBNF syntax to Lark. Raises UserError if it is in neither."""
    try:
        return any_to_lark(text)
    except Exception as error:
        raise UserError(_in_one_line(str(error))) from error


def lark_of_regex(regex: str) -> str:
    """Return a Lark grammar for the texts that a regular expression in Rust syntax matches in full."""
    written = llguidance.regex_to_lark(regex, use_ascii="").replace("\n", "\\n").replace("\r", "\\r")
    return f"start: /{written}/"


@functools.lru_cache
def _takes_format(name: str) -> bool:
    schema = {"type": "string", "format": name}
    return not llguidance.LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]}))


def _read_tokens(folder: Path, vocab_size: int) -> llguidance.LLTokenizer:
    """Read the tokenizer, add ``_END``, and pad the vocabulary to the model's size.

    The tokens that end a text differ between requests, so llguidance does not know them.
    """
    tokenizer = load_tokenizer(folder)
    try:
        taken = set(tokenizer.get_vocab(with_added_tokens=True).values())
        tokenizer.add_special_tokens([_END])
        end = tokenizer.token_to_id(_END)
        if end is None or end in taken:
            raise ValueError("its token ids have gaps, so a new token gets an id that is already taken")
        return llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=max(end + 1, vocab_size), eos_token=end)
    except Exception as error:
        raise UserError(f"this model's tokenizer does not support grammars: {_in_one_line(str(error))}") from error


def _in_words(error: str) -> str:
    """Explain llguidance's error to the grammar's author in one line."""
    known = (words for marks, words in _WORDS.items() if any(mark in error for mark in marks))
    return next(known, _in_one_line(error))


def _in_one_line(text: str) -> str:
    """Return llguidance's message without diagrams and parser state."""
    first, *others = text.splitlines() or [""]
    return " ".join([first.strip(), *(line for line in others if line.startswith("error: "))])
