"""From the tokens of one choice to the text its client sees: characters made whole, stop strings cut off."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cluster.spec.messages import FinishReason
from cluster.tokenizer import Detokenizer


class StopScanner:
    """Lets text through up to the first stop string. How the text is cut into pieces makes no difference."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string stops everything"
        self._stops = stops
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self.hit = False
        """A stop string came; it and what follows it are not let through."""

    def push(self, text: str) -> str:
        """What can be shown now that this text came."""
        assert not self.hit, "nothing follows a stop string"
        self._held += text
        found = [(start + len(stop), start) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if found:
            self.hit = True
            return self._let_through(min(found)[1])
        return self._let_through(len(self._held) - self._num_suspect())

    def flush(self) -> str:
        """The text held back, now that nothing can complete it; empty after a hit."""
        return "" if self.hit else self._let_through(len(self._held))

    def _let_through(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _num_suspect(self) -> int:
        """Length of the longest ending that begins a stop string."""
        longest = min(len(self._held), max((len(stop) for stop in self._stops), default=1) - 1)
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0)


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of an answer, or its whole: text may come later than its tokens, never earlier."""

    text: str
    finish: FinishReason | None
    token_ids: tuple[int, ...] = ()


class AnswerText:
    """The text of one choice."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], stop_token_ids: Collection[int]) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops)
        self._stop_token_ids = stop_token_ids
        self.num_tokens = 0
        """Tokens up to the end of the text; the token that ended it counts."""

    def push(self, token_ids: Sequence[int], finish: FinishReason | None) -> list[Piece]:
        """A piece for every token, up to the one that completes a stop string; finish belongs to the last token."""
        pieces = []
        for index, token_id in enumerate(token_ids):
            pieces.append(self._take(token_id, finish if index == len(token_ids) - 1 else None))
            if self._scanner.hit:
                return pieces
        if finish is not None and not token_ids:
            pieces.append(self._ended("", finish, ()))
        return pieces

    def _take(self, token_id: int, finish: FinishReason | None) -> Piece:
        self.num_tokens += 1
        # The text of a token that stops the answer is not shown.
        is_shown = finish is not FinishReason.STOP or token_id not in self._stop_token_ids
        text = self._scanner.push(self._detokenizer.push(token_id)) if is_shown else ""
        if self._scanner.hit:
            return Piece(text, FinishReason.STOP, (token_id,))
        return Piece(text, None, (token_id,)) if finish is None else self._ended(text, finish, (token_id,))

    def _ended(self, text: str, finish: FinishReason, token_ids: tuple[int, ...]) -> Piece:
        """The last piece, with what was held back."""
        text += self._scanner.push(self._detokenizer.flush())
        text += self._scanner.flush()
        return Piece(text, FinishReason.STOP if self._scanner.hit else finish, token_ids)
