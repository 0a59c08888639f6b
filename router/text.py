"""From the tokens of one choice to the text its client sees: characters made whole, stop strings cut off."""

from collections.abc import Sequence

import msgspec

from cluster.spec.sampling import FinishReason, TokenLogprobs
from cluster.tokenizer import Detokenizer, Tokenizer
from router.token_text import token_bytes


class TextRules(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of an answer become its text, and what ends it."""

    stops: Sequence[str] = ()
    """Strings that end the text."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens whose text is not shown where they end the answer."""
    asked_stop_ids: frozenset[int] = frozenset()
    """Those of them that the request named, and is told of."""
    include_stop: bool = False
    """What ended the text is shown."""
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """Stop strings in the text of the tokens before this one do not count."""
    prompt_only: bool = False
    """The answer, a token for want of less, is not shown."""


class StopScanner:
    """Lets text through up to the first stop string. How the text is cut into pieces makes no difference."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """With ``include`` the stop string itself is let through."""
        assert all(stops), "an empty stop string stops everything"
        self._stops = stops
        self._include = include
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self.hit: str | None = None
        """The stop string that came; what follows it is not let through."""

    def push(self, text: str) -> str:
        """What can be shown now that this text came."""
        assert self.hit is None, "nothing follows a stop string"
        if not self._stops:
            return text
        self._held += text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if found:
            end, start, self.hit = min(found)
            return self._let_through(end if self._include else start)
        return self._let_through(len(self._held) - self._num_suspect())

    def flush(self) -> str:
        """The text held back, now that nothing can complete it; empty after a hit."""
        return self._let_through(len(self._held)) if self.hit is None else ""

    def _let_through(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _num_suspect(self) -> int:
        """Length of the longest ending that begins a stop string."""
        longest = min(len(self._held), max((len(stop) for stop in self._stops), default=1) - 1)
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0)


class Piece(msgspec.Struct, frozen=True):
    """One token of an answer, or its whole: text may come later than its tokens, never earlier."""

    text: str
    finish: FinishReason | None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of every token, where they were asked for."""
    offsets: tuple[int, ...] = ()
    """Characters of the text before each token."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of every token of the prompt but the first, where they were asked for; with the first token."""
    stopped_by: str | int | None = None
    """The stop string, or the token named by the request, that ended the answer; with the last token."""


def join(pieces: Sequence[Piece]) -> Piece:
    """The whole that these are the parts of."""
    if len(pieces) == 1:
        return pieces[0]
    return Piece(
        text="".join(piece.text for piece in pieces),
        finish=pieces[-1].finish,
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        logprobs=tuple(told for piece in pieces for told in piece.logprobs),
        offsets=tuple(offset for piece in pieces for offset in piece.offsets),
        prompt_logprobs=pieces[0].prompt_logprobs,
        stopped_by=pieces[-1].stopped_by,
    )


class AnswerText:
    """The text of one choice."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, rules.skip_special_tokens)
        self._scanner = StopScanner(rules.stops, rules.include_stop)
        self._rules = rules
        self._num_tokens = 0
        self._num_chars = 0
        """Of the text so far, what is held back for a stop string and the stop string included."""
        self._unfinished_from = 0
        """Characters of the text before the character that is unfinished, if one is."""

    def push(
        self, token_ids: Sequence[int], finish: FinishReason | None, logprobs: Sequence[TokenLogprobs] = ()
    ) -> list[Piece]:
        """A piece for every token, up to the one that completes a stop string; finish belongs to the last token."""
        if self._rules.prompt_only:
            return [Piece("", FinishReason.LENGTH)] if finish is not None else []
        pieces = []
        for index, token_id in enumerate(token_ids):
            offset = self._offset(token_id)
            text, end = self._take(token_id, finish if index == len(token_ids) - 1 else None)
            stopped_by = None if end is None else self._stopped_by(token_id, end)
            told = tuple(logprobs[index : index + 1])
            pieces.append(Piece(text, end, (token_id,), told, (offset,), stopped_by=stopped_by))
            if self._scanner.hit is not None:
                return pieces
        if finish is not None and not token_ids:
            text, end = self._end("", finish)
            pieces.append(Piece(text, end, stopped_by=self._scanner.hit))
        return pieces

    def _stopped_by(self, last_token_id: int, end: FinishReason) -> str | int | None:
        """What ended the answer, if that was a stop string, or its last token."""
        is_asked = end is FinishReason.STOP and last_token_id in self._rules.asked_stop_ids
        return last_token_id if is_asked and self._scanner.hit is None else self._scanner.hit

    def _offset(self, token_id: int) -> int:
        """Characters of the text before the one to which the next token's first byte belongs."""
        held = self._detokenizer.held_text
        if not held:
            self._unfinished_from = self._num_chars
        elif not _goes_on(token_bytes(self._tokenizer, token_id)):
            self._unfinished_from = self._num_chars + len(held)
        return self._unfinished_from

    def _take(self, token_id: int, finish: FinishReason | None) -> tuple[str, FinishReason | None]:
        """What one token shows, and why the text ends with it, if it does."""
        self._num_tokens += 1
        stops = finish is FinishReason.STOP and token_id in self._rules.stop_token_ids
        text = self._scan(self._detokenizer.push(token_id)) if self._rules.include_stop or not stops else ""
        if self._scanner.hit is not None:
            return text, FinishReason.STOP
        return (text, None) if finish is None else self._end(text, finish)

    def _end(self, text: str, finish: FinishReason) -> tuple[str, FinishReason]:
        """The last text, with what was held back."""
        text += self._scan(self._detokenizer.flush())
        text += self._scanner.flush()
        return text, finish if self._scanner.hit is None else FinishReason.STOP

    def _scan(self, text: str) -> str:
        self._num_chars += len(text)
        return text if self._num_tokens < self._rules.min_tokens else self._scanner.push(text)


def _goes_on(token: bytes) -> bool:
    """A token begins in the middle of a character of UTF-8, or has no bytes."""
    return not token or token[0] & 0xC0 == 0x80
