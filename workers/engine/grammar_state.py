"""How far one request's output has come in its grammar, and which tokens may come next."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.grammar import Grammars, Matcher
from cluster.spec.errors import UserError
from cluster.spec.sampling import Sampling


class GrammarState:
    """Made from the output so far, so that it is right after a handoff and after a preemption too."""

    def __init__(self, grammars: Grammars | None, sampling: Sampling, output: Sequence[int], vocab_size: int) -> None:
        self._ending_ids = np.array(sorted(sampling.ending_ids), dtype=np.int64)
        self._min_tokens = sampling.min_tokens
        self._all = np.ones(vocab_size, dtype=np.bool_)
        self.problem = ""
        """Why no token follows the grammar; then any is drawn, and the request fails."""
        self._matcher: Matcher | None = None
        try:
            assert grammars is not None, "this rank draws no tokens"
            self._matcher = grammars.matcher(sampling.grammar)
        except UserError as error:
            self.problem = f"the grammar cannot be followed: {error}"
        self._advance(output)

    @property
    def is_whole(self) -> bool:
        """Nothing can follow."""
        return self._matcher is not None and self._matcher.is_over

    def allowed(self, position: int) -> NDArray[np.bool_]:
        """Which tokens can be drawn at this output position ``[vocab_size]``.

        A token that ends the answer waits until the text is whole, and for ``min_tokens`` if anything else can come.
        """
        if self._matcher is None or self.problem:
            return self._all
        allowed = self._matcher.allowed()
        self._note_problem()
        allowed[self._ending_ids] = self._matcher.is_whole and position >= self._min_tokens
        if not allowed.any():
            allowed[self._ending_ids] = self._matcher.is_whole
        if not self.problem and not allowed.any():
            self.problem = "the grammar cannot be followed: no token of this model fits, but such as end the answer"
        return self._all if self.problem else allowed

    def append(self, token_id: int) -> None:
        """A token was drawn."""
        if token_id not in self._ending_ids:
            self._advance([token_id])

    def _advance(self, token_ids: Sequence[int]) -> None:
        if self._matcher is not None and not self.problem:
            self._matcher.advance(token_ids)
            self._note_problem()

    def _note_problem(self) -> None:
        assert self._matcher is not None
        if problem := self._matcher.problem:
            self.problem = f"the grammar cannot be followed: {problem}"
