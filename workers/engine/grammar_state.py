"""Position of one request's output in its grammar, which determines the tokens that may come next."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.grammar import Grammars, Matcher
from cluster.spec.errors import UserError
from cluster.spec.sampling import Sampling


class GrammarState:
    """Grammar state of one request, rebuilt from its output, so it survives handoff and preemption."""

    def __init__(self, grammars: Grammars | None, sampling: Sampling, output: Sequence[int], vocab_size: int) -> None:
        self._ending_ids = np.array(sorted(sampling.ending_ids), dtype=np.int64)
        self._min_tokens = sampling.min_tokens
        self._all = np.ones(vocab_size, dtype=np.bool_)
        self.problem = ""
        """Reason why no token follows the grammar; any token is then sampled, and the request fails."""
        self._matcher: Matcher | None = None
        try:
            assert grammars is not None, "this rank draws no tokens"
            self._matcher = grammars.matcher(sampling.grammar)
        except UserError as error:
            self.problem = f"the grammar cannot be followed: {error}"
        self._advance(output)

    @property
    def is_whole(self) -> bool:
        """Return whether nothing can follow."""
        return self._matcher is not None and self._matcher.is_over

    def allowed(self, position: int) -> NDArray[np.bool_]:
        """Return a mask ``[vocab_size]`` of the tokens that can be sampled at this output position.

        A token that ends the answer waits until the text is complete, and for ``min_tokens`` if anything else can
        come.
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
        """Advance by a sampled token."""
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
