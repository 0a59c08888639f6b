"""Text of answers: from tokens (whole characters, stop strings cut off), and in pieces, split at markers."""

import re
from collections.abc import Sequence

import msgspec

from cluster.spec.sampling import FinishReason, TokenLogprobs
from cluster.tokenizer import Detokenizer, Tokenizer
from router.request import OutputChunk

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_PREFIX = "\u2581"
"""Character that SentencePiece writes for the space before a word."""


class TextRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for the text of an answer, and for its end."""

    stops: Sequence[str] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens whose text is not shown when they end the answer."""
    asked_stop_ids: frozenset[int] = frozenset()
    """Stop tokens that the request named, and that the answer reports."""
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """Stop strings in the text of earlier tokens do not count."""
    prompt_only: bool = False
    """True if the answer is not shown: max_tokens is 0, but one token is the minimum."""


def join(chunks: Sequence[OutputChunk]) -> OutputChunk:
    if len(chunks) == 1:
        return chunks[0]
    return OutputChunk(
        index=chunks[0].index,
        text="".join(chunk.text for chunk in chunks),
        finish=chunks[-1].finish,
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(given for chunk in chunks for given in chunk.logprobs),
        offsets=tuple(offset for chunk in chunks for offset in chunk.offsets),
        prompt_logprobs=chunks[0].prompt_logprobs,
        stopped_by=chunks[-1].stopped_by,
    )


class MarkerScanner:
    """Passes text on up to the first of some markers."""

    def __init__(self, *markers: str) -> None:
        assert all(markers), "an empty marker is everywhere"
        self._markers = markers
        self._held = ""
        self.hit: str | None = None
        """The marker that came last."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text before the first marker, and the text after it; None until one has come."""
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
        """Return the length of the longest ending that begins a marker."""
        longest = min(len(text), max(map(len, self._markers)) - 1)
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if any(marker.startswith(text[-n:]) for marker in self._markers)), 0)


class Trimmer:
    """Drops the white space at the beginning of a text, and holds back that at its end."""

    def __init__(self, *, keeps_start: bool = False) -> None:
        self._begun = keeps_start
        self._held = ""

    def push(self, text: str) -> str:
        """Return what is certainly not at the end."""
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
    def __init__(self, tokenizer: Tokenizer, rules: TextRules, index: int = 0) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, rules.skip_special_tokens)
        self._scanner = MarkerScanner(*rules.stops)
        self._rules = rules
        self._num_tokens = 0
        self._num_chars = 0
        """Length of the text so far, including what is held back and the stop string."""
        self._unfinished_from = 0
        """Length of the text before an incomplete character, if there is one."""

    def push(
        self, token_ids: Sequence[int], finish: FinishReason | None, logprobs: Sequence[TokenLogprobs] = ()
    ) -> list[OutputChunk]:
        """Return a chunk for every token, up to the one that completes a stop string; ``finish`` is the last one's."""
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
        """Return the stop string or requested stop token that ended the answer."""
        is_asked = end is FinishReason.STOP and last_token_id in self._rules.asked_stop_ids
        return last_token_id if is_asked and self._scanner.hit is None else self._scanner.hit

    def _offset(self, token_id: int) -> int:
        """Return the length of the text before the character that the next token's first byte belongs to."""
        held = self._detokenizer.held_text
        if not held:
            self._unfinished_from = self._num_chars
        elif not _continues_character(token_bytes(self._tokenizer, token_id)):
            self._unfinished_from = self._num_chars + len(held)
        return self._unfinished_from

    def _take(self, token_id: int, finish: FinishReason | None) -> tuple[str, FinishReason | None]:
        """Return what one token shows, and why the text ends with it, if it does."""
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
        self._num_chars += len(text)
        if self._num_tokens < self._rules.min_tokens:
            return text
        shown, after = self._scanner.push(text)
        return shown + (self._scanner.hit or "") if after is not None and self._rules.include_stop else shown


def _continues_character(token: bytes) -> bool:
    """Return whether a token begins inside a UTF-8 character, or has no bytes."""
    return not token or token[0] & 0xC0 == 0x80


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text; U+FFFD for bytes that are no character by themselves."""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    # Decoders drop the space before the first word of a text.
    is_word = tokenizer.token_of(token_id).startswith(_WORD_PREFIX)
    return f" {text}" if is_word and not text.startswith(" ") else text


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return a token's bytes; joined over all tokens they are the text's."""
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
    """Map byte-level BPE's characters to bytes: printable bytes stand for themselves, others for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
