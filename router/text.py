"""Text of answers: detokenized in whole characters, cut at stop strings, and split at markers."""

import re
from collections.abc import Sequence

import msgspec

from cluster.spec.sampling import FinishReason, TokenLogprobs
from cluster.tokenizer import Detokenizer, Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_PREFIX = "\u2581"
"""Character that SentencePiece writes for the space before a word."""


class TextRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for an answer's text and for where it ends."""

    stops: Sequence[str] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens whose text is hidden if they end the answer."""
    asked_stop_ids: frozenset[int] = frozenset()
    """Stop tokens that the request names. If one of them ends the answer, the response reports it."""
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """Minimum number of tokens before a stop string can end the answer."""
    prompt_only: bool = False
    """True if the answer is hidden because max_tokens is 0; replicas generate at least one token."""
    continues_prompt: bool = False
    """True if the text follows the prompt's. Otherwise it loses a space at its start that the tokenizer writes for
    every text.
    """


class OutputChunk(msgspec.Struct, kw_only=True):
    """Next part of a choice: at most one token, and the text that it completes."""

    index: int = 0
    """Index of the choice in its response."""
    text: str = ""
    """Text that these tokens complete, which may include text held back from earlier tokens."""
    token_ids: Sequence[int] = ()
    finish: FinishReason | None = None
    """Finish reason; set with the last token."""
    logprobs: Sequence[TokenLogprobs] = ()
    """One entry per token, if requested."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """One entry for every prompt token but the first, if requested; set with the first token."""
    written_logprobs: Sequence[msgspec.Raw] = ()
    """JSON of each token's log-probabilities in the form of the response; see ``Writer.prepare``."""
    offsets: Sequence[int] = ()
    """Number of characters before each token in the answer."""
    stopped_by: str | int | None = None
    """Stop string or requested stop token that ended the answer; set with the last token."""


class MarkerScanner:
    """Splits a text, given in pieces, at the first of several markers."""

    def __init__(self, *markers: str) -> None:
        assert all(markers), "an empty marker is everywhere"
        self._markers = markers
        self._held = ""
        self.hit: str | None = None
        """The last marker found."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text before the first marker, and the text after it or, if no marker is complete, None."""
        if not self._markers:
            return text, None
        held = self._held + text
        found = [(start + len(marker), start, marker) for marker in self._markers if (start := held.find(marker)) >= 0]
        if found:
            end, start, self.hit = min(found)
            self._held = ""
            return held[:start], held[end:]
        end = len(held) - self._num_suspect(held)
        self._held = held[end:]
        return held[:end], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _num_suspect(self, text: str) -> int:
        """Return the length of the longest suffix that is a marker's prefix."""
        longest = min(len(text), max(map(len, self._markers)) - 1)
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if any(marker.startswith(text[-n:]) for marker in self._markers)), 0)


class Trimmer:
    """Strips leading white space from a text given in pieces, and holds back trailing white space."""

    def __init__(self, *, keeps_start: bool = False) -> None:
        self._begun = keeps_start
        self._held = ""

    def push(self, text: str) -> str:
        self._held += text
        if not self._begun:
            self._held = self._held.lstrip()
        end = len(self._held.rstrip())
        self._begun = self._begun or end > 0
        through, self._held = self._held[:end], self._held[end:]
        return through

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class AnswerText:
    """Text of one choice, made from its tokens up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules, index: int = 0, prompt_ids: Sequence[int] = ()) -> None:
        self._index = index
        self._tokenizer = tokenizer
        context = prompt_ids if rules.continues_prompt else ()
        self._detokenizer = Detokenizer(tokenizer, rules.skip_special_tokens, context)
        self._scanner = MarkerScanner(*rules.stops)
        self._rules = rules
        self._num_tokens = 0
        self.num_chars = 0
        """Length of the text so far, including held-back text and the stop string."""
        self._unfinished_from = 0
        """Length of the text before an incomplete character."""

    @property
    def is_stopped(self) -> bool:
        """True once a stop string has ended the text."""
        return self._scanner.hit is not None

    def push(
        self, token_ids: Sequence[int], finish: FinishReason | None, logprobs: Sequence[TokenLogprobs] = ()
    ) -> list[OutputChunk]:
        """Return a chunk for every token, up to the one that completes a stop string."""
        if self._rules.prompt_only:
            return [OutputChunk(index=self._index, finish=FinishReason.LENGTH)] if finish is not None else []
        chunks, last = [], len(token_ids) - 1
        for number, token_id in enumerate(token_ids):
            offset = self._offset(token_id)
            text, end = self._take(token_id, finish if number == last else None)
            chunk = OutputChunk(
                index=self._index,
                token_ids=(token_id,),
                finish=end,
                logprobs=logprobs[number : number + 1] if logprobs else (),
                text=text,
                offsets=(offset,),
                stopped_by=None if end is None else self._stopped_by(token_id, end),
            )
            chunks.append(chunk)
            if self._scanner.hit is not None:
                return chunks
        if finish is not None and not token_ids:
            text, end = self._end("", finish)
            chunks.append(OutputChunk(index=self._index, finish=end, text=text, stopped_by=self._scanner.hit))
        return chunks

    def _stopped_by(self, last_token_id: int, end: FinishReason) -> str | int | None:
        is_asked = end is FinishReason.STOP and last_token_id in self._rules.asked_stop_ids
        return last_token_id if is_asked and self._scanner.hit is None else self._scanner.hit

    def _offset(self, token_id: int) -> int:
        """Return the offset in the text of the character that contains the token's first byte."""
        held = self._detokenizer.held_text
        if not held:
            self._unfinished_from = self.num_chars
        elif not _continues_character(token_bytes(self._tokenizer, token_id)):
            self._unfinished_from = self.num_chars + len(held)
        return self._unfinished_from

    def _take(self, token_id: int, finish: FinishReason | None) -> tuple[str, FinishReason | None]:
        """Return the text that one token completes, and the finish reason if the text ends there."""
        self._num_tokens += 1
        stops = finish is FinishReason.STOP and token_id in self._rules.stop_token_ids
        text = self._scan(self._detokenizer.push(token_id)) if self._rules.include_stop or not stops else ""
        if self._scanner.hit is not None:
            return text, FinishReason.STOP
        return (text, None) if finish is None else self._end(text, finish)

    def _end(self, text: str, finish: FinishReason) -> tuple[str, FinishReason]:
        text += self._scan(self._detokenizer.flush())
        text += self._scanner.flush()
        return text, finish if self._scanner.hit is None else FinishReason.STOP

    def _scan(self, text: str) -> str:
        self.num_chars += len(text)
        if self._num_tokens < self._rules.min_tokens:
            return text
        shown, after = self._scanner.push(text)
        return shown + (self._scanner.hit or "") if after is not None and self._rules.include_stop else shown


def _continues_character(token: bytes) -> bool:
    """Return whether a token starts inside a UTF-8 character, or is empty."""
    return not token or token[0] & 0xC0 == 0x80


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text, with U+FFFD for incomplete characters."""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    # Decoders drop a space at the start of a text.
    token = tokenizer.token_of(token_id)
    num_spaces = len(token) - len(token.lstrip(_WORD_PREFIX))
    return " " * (num_spaces - (len(text) - len(text.lstrip(" ")))) + text


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return a token's bytes. Joined over all tokens, they are the text's UTF-8."""
    text = token_text(tokenizer, token_id)
    if "\ufffd" not in text:
        return text.encode()
    token = tokenizer.token_of(token_id)
    if found := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(found[1], 16)])
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return text.encode()


def _byte_characters() -> dict[str, int]:
    """Map byte-level BPE's characters to bytes: printable ones to their own codes, U+0100 onwards to the rest."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
