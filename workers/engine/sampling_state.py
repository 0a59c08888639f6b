"""Sampling state of one request besides its logits; exists on the sampling rank."""

import math

import numpy as np
from numpy.typing import NDArray

from cluster.grammar import Grammars
from cluster.spec.step_messages import Admit
from workers.engine.grammar_state import GrammarState
from workers.engine.token_counts import TokenCounts

Shifts = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Token ids, each once, and the values added to their logits; -inf forbids."""


class SamplingState:
    """Sampling settings of one request, and its tokens as far as these look back."""

    def __init__(self, admit: Admit, vocab_size: int, grammars: Grammars | None = None) -> None:
        """Build the state, waiting for its grammar to be compiled if there is one."""
        self.sampling = sampling = admit.sampling
        output = admit.history[admit.prompt_len :]
        self.asks = sampling.looks_back or bool(sampling.logit_bias or sampling.allowed_ids or sampling.min_tokens)
        """Whether logits may have to be changed."""
        self._vocab_size = vocab_size
        self._tokens = list(admit.history) if sampling.bad_words else []
        self._bias = _shifts_of(sampling.logit_bias)
        self.allowed = np.array(sorted(sampling.allowed_ids), dtype=np.int64)
        """Set of tokens that can be sampled, sorted; empty means all."""
        self.counts: TokenCounts | None = None
        """Token counts, if there are penalties."""
        if sampling.has_penalties:
            prompt = admit.history[: admit.prompt_len] if sampling.repetition_penalty != 1 else []
            self.counts = TokenCounts(prompt, output)
        self.grammar = GrammarState(grammars, sampling, output, vocab_size) if sampling.grammar else None

    def shifts(self, position: int) -> Shifts:
        """Return bias and bans at this output position."""
        if banned := self._banned(position):
            return _shifts_of(self.sampling.logit_bias | dict.fromkeys(banned, -math.inf))
        return self._bias

    def append(self, token_id: int) -> None:
        """Record a sampled token."""
        if self.sampling.bad_words:
            self._tokens.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)
        if self.grammar is not None:
            self.grammar.append(token_id)

    def _banned(self, position: int) -> set[int]:
        """Return banned tokens; bans that would leave nothing are lifted, since some token must be sampled."""
        banned = set(self.sampling.ending_ids) if position < self.sampling.min_tokens else set()
        for word in self.sampling.bad_words:
            before = word[:-1]
            if not before or self._tokens[-len(before) :] == before:
                banned.add(word[-1])
        left = self.sampling.allowed_ids - banned if self.sampling.allowed_ids else self._vocab_size > len(banned)
        return banned if left else set()


def _shifts_of(shifts: dict[int, float]) -> Shifts:
    return np.fromiter(shifts.keys(), dtype=np.int64), np.fromiter(shifts.values(), dtype=np.float32)
