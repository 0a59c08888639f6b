"""Sampling state of a request, and its changes to logits: allowed tokens, bias, bans, penalties and grammars.

The work is proportional to the number of tokens that settings affect or, with a grammar, to the vocabulary size. Rows
without such settings cost nothing. Rows do not depend on each other.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.grammar import Grammars, Matcher
from cluster.spec.errors import UserError
from cluster.spec.sampling import Sampling
from cluster.spec.step_messages import NewRequest
from workers.device import device_of


class TokenCounts:
    """Number of times that each token occurs in the output. A token that occurs only in the prompt has a count of 0."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        counts = Counter(output)
        counts.update(dict.fromkeys(prompt, 0))
        self._indices = {token_id: index for index, token_id in enumerate(counts)}
        self._ids = np.fromiter(counts.keys(), dtype=np.int64)
        self._counts = np.fromiter(counts.values(), dtype=np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._indices)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._indices)]

    def add(self, token_id: int) -> None:
        index = self._indices.setdefault(token_id, len(self._indices))
        if index == len(self._ids):
            room = np.zeros(max(len(self._ids), 64), dtype=np.int64)
            self._ids = np.concatenate([self._ids, room])
            self._counts = np.concatenate([self._counts, room.astype(np.float32)])
        self._ids[index] = token_id
        self._counts[index] += 1


class GrammarState:
    """Grammar state of one request. It is built from the output, so that it survives handoff and preemption."""

    def __init__(self, grammars: Grammars | None, sampling: Sampling, output: Sequence[int], vocab_size: int) -> None:
        self._ending_ids = np.array(sorted(sampling.ending_ids), dtype=np.int64)
        self._min_tokens = sampling.min_tokens
        self._all = np.ones(vocab_size, dtype=np.bool_)
        self.problem = ""
        """Reason why no token fits the grammar. If set, sampling ignores the grammar, and the request fails."""
        self._matcher: Matcher | None = None
        try:
            assert grammars is not None, "this rank does not sample tokens"
            self._matcher = grammars.matcher(sampling.grammar)
        except UserError as error:
            self.problem = f"the grammar cannot be followed: {error}"
        self._advance(output)

    @property
    def is_over(self) -> bool:
        return self._matcher is not None and self._matcher.is_over

    def allowed(self, position: int) -> NDArray[np.bool_]:
        """Return a mask ``[vocab_size]`` of the tokens that can be sampled at this output position.

        A token that ends the answer is allowed once the text is complete. Before ``min_tokens``, it is allowed only if
        no other token is.
        """
        if self._matcher is None or self.problem:
            return self._all
        allowed = self._matcher.allowed()
        self._note_problem()
        allowed[self._ending_ids] = self._matcher.is_whole and position >= self._min_tokens
        if not allowed.any():
            allowed[self._ending_ids] = self._matcher.is_whole
        if not self.problem and not allowed.any():
            self.problem = "the grammar cannot be followed: only tokens that end the answer fit"
        return self._all if self.problem else allowed

    def append(self, token_id: int) -> None:
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


Shifts = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Distinct token ids, and the values added to their logits."""


class SamplingState:
    """Settings that change one request's logits, and the earlier tokens on which its sampling depends."""

    def __init__(self, request: NewRequest, vocab_size: int, grammars: Grammars | None = None) -> None:
        """Create the state. Wait until the request's grammar is compiled."""
        self.sampling = sampling = request.sampling
        output = request.history[request.prompt_len :]
        self._vocab_size = vocab_size
        self._tokens = list(request.history) if sampling.bad_words else []
        self.bias = _shifts_of(sampling.logit_bias)
        self.forbidden = _mask_of_others(sampling.allowed_ids, vocab_size) if sampling.allowed_ids else None
        """Mask ``[vocab_size]`` of the tokens that cannot be sampled; None if all can be."""
        self.counts: TokenCounts | None = None
        if sampling.has_penalties:
            prompt = request.history[: request.prompt_len] if sampling.repetition_penalty != 1 else []
            self.counts = TokenCounts(prompt, output)
        self.grammar = GrammarState(grammars, sampling, output, vocab_size) if sampling.grammar else None

    def append(self, token_id: int) -> None:
        if self.sampling.bad_words:
            self._tokens.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)
        if self.grammar is not None:
            self.grammar.append(token_id)

    def banned(self, position: int) -> set[int]:
        """Return the banned tokens at an output position, or an empty set if they would leave no other token."""
        banned = set(self.sampling.ending_ids) if position < self.sampling.min_tokens else set()
        for word in self.sampling.bad_words:
            before = word[:-1]
            if not before or self._tokens[-len(before) :] == before:
                banned.add(word[-1])
        allowed = self.sampling.allowed_ids
        is_any_left = not allowed <= banned if allowed else self._vocab_size > len(banned)
        return banned if is_any_left else set()


def _mask_of_others(token_ids: Collection[int], vocab_size: int) -> NDArray[np.bool_]:
    mask = np.ones(vocab_size, dtype=np.bool_)
    mask[np.fromiter(token_ids, dtype=np.int64)] = False
    return mask


def _shifts_of(shifts: dict[int, float]) -> Shifts:
    return np.fromiter(shifts.keys(), dtype=np.int64), np.fromiter(shifts.values(), dtype=np.float32)


Numbers = NDArray[np.float32]


def process(logits: Tensor, states: Mapping[int, SamplingState], positions: Sequence[int]) -> None:
    """Change logits ``[num_rows, vocab_size]`` in place. ``states`` holds the states of the rows to change.

    ``positions`` are the output positions of all rows.
    """
    forbidden = {row: state.forbidden for row, state in states.items() if state.forbidden is not None}
    banned = {row: ids for row, state in states.items() if (ids := state.banned(positions[row]))}
    is_out = {row: ~state.grammar.allowed(positions[row]) for row, state in states.items() if state.grammar is not None}
    both = [row for row in is_out if row in forbidden or row in banned]
    before = logits[device_of(logits).put_index(both)] if both else logits
    _forbid_others(logits, forbidden)
    _shift(logits, {row: state.bias for row, state in states.items() if len(state.bias[0])})
    _forbid(logits, banned)
    _penalise(logits, states, {row: state.counts for row, state in states.items() if state.counts is not None})
    _forbid_others(logits, is_out)
    if both:
        _prefer_grammars(logits, before, {row: is_out[row] for row in both})


def _forbid_others(logits: Tensor, forbidden: Mapping[int, NDArray[np.bool_]]) -> None:
    """Forbid the tokens of each row's mask, since lists of allowed tokens may be as long as the vocabulary."""
    if forbidden:
        masks = device_of(logits).put(torch.from_numpy(np.stack(list(forbidden.values()))))
        for row, mask in zip(forbidden, masks, strict=True):
            logits[row].masked_fill_(mask, -math.inf)


def _forbid(logits: Tensor, banned: Mapping[int, set[int]]) -> None:
    if banned:
        index = _index({row: np.array(list(ids), np.int64) for row, ids in banned.items()}, logits)
        # Torch would copy a plain number to a GPU, and wait for it.
        logits[index] = logits.new_full((1,), -math.inf)


def _prefer_grammars(logits: Tensor, before: Tensor, is_out: Mapping[int, NDArray[np.bool_]]) -> None:
    """Apply only the grammar to each row whose other settings forbid all tokens that the grammar allows.

    ``before`` holds the unchanged logits of these rows.
    """
    rows = device_of(logits).put_index(list(is_out))
    _forbid_others(before, dict(enumerate(is_out.values())))
    kept = logits[rows]
    logits[rows] = torch.where(kept.amax(dim=-1, keepdim=True) == -math.inf, before, kept)


def _shift(logits: Tensor, shifts: Mapping[int, tuple[NDArray[np.int64], Numbers]]) -> None:
    if shifts:
        index = _index({row: ids for row, (ids, _) in shifts.items()}, logits)
        logits[index] += _tensor([values for _, values in shifts.values()], logits)


def _penalise(logits: Tensor, states: Mapping[int, SamplingState], counted: Mapping[int, TokenCounts]) -> None:
    """Apply repetition penalties (Keskar et al., 2019), then frequency and presence penalties as in OpenAI's API."""
    if not counted:
        return

    def spread(setting: str) -> Tensor:
        values = [getattr(states[row].sampling, setting) for row in counted]
        return _tensor(
            [np.repeat(np.array(values, np.float32), [len(known.ids) for known in counted.values()])], logits
        )

    index = _index({row: known.ids for row, known in counted.items()}, logits)
    counts = _tensor([known.counts for known in counted.values()], logits)
    repetition = spread("repetition_penalty")
    before = logits[index]
    scaled = torch.where(before > 0, before / repetition, before * repetition)
    logits[index] = scaled - spread("frequency_penalty") * counts - spread("presence_penalty") * (counts > 0)


def _index(ids: Mapping[int, NDArray[np.int64]], like: Tensor) -> tuple[Tensor, Tensor]:
    rows = np.repeat(np.array(list(ids), np.int64), [len(part) for part in ids.values()])
    columns = np.concatenate(list(ids.values()))
    return device_of(like).put(torch.from_numpy(rows)), device_of(like).put(torch.from_numpy(columns))


def _tensor(parts: Sequence[Numbers], like: Tensor) -> Tensor:
    return device_of(like).put(torch.from_numpy(np.concatenate(parts)))
