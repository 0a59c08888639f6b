"""Log-probabilities of prompt tokens: the right rows, in small batches."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes.steps import Request, step_of
from workers.device import CPU
from workers.engine import prompt_logprobs as module
from workers.engine.batch import build_step_batch
from workers.engine.prompt_logprobs import Asked, prompt_logprobs
from workers.parallel.communicator import Communicator

VOCAB_SIZE, HIDDEN = 7, 3


class FakeModel:
    """Model with a head only. It records the number of rows in each call."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(vocab_size=VOCAB_SIZE)
        self.head = torch.randn(HIDDEN, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
        self.num_rows: list[int] = []

    def logits(self, hidden: Tensor) -> Tensor:
        self.num_rows.append(len(hidden))
        return hidden @ self.head


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_each_target_is_scored_by_the_token_before_it(monkeypatch: pytest.MonkeyPatch, rows_at_once: int) -> None:
    monkeypatch.setattr(module, "_MAX_LOGITS", rows_at_once * VOCAB_SIZE)
    lens = [4, 2, 3]
    batch = build_step_batch(
        step_of([Request([0] * length, 0, [page]) for page, length in enumerate(lens)]),
        cp=1,
        cp_rank=0,
        page_size=4,
        null_slot=100,
        device=CPU,
    )
    hidden = torch.randn(sum(lens), HIDDEN, generator=torch.Generator().manual_seed(2))
    model: Any = FakeModel()
    asked = [Asked([5, 1, 6], 2), Asked([], 0), Asked([0, 0, 4], 9)]
    reported = prompt_logprobs(model, Communicator("cp"), batch, hidden, asked)
    assert [len(of_row) for of_row in reported] == [3, 0, 3]
    assert (sum(model.num_rows), max(model.num_rows)) == (6, min(rows_at_once, 6))
    expected = (hidden @ model.head).log_softmax(-1)
    for of_row, first, row in zip(reported, (0, 4, 6), asked, strict=True):
        for offset, (entry, target) in enumerate(zip(of_row, row.scored_ids, strict=True)):
            logprobs = expected[first + offset]
            num_top = min(row.num_top, VOCAB_SIZE)
            assert entry.logprob == pytest.approx(float(logprobs[target]), abs=1e-6)
            assert entry.rank == 1 + int((logprobs > logprobs[target]).sum())
            assert entry.top_ids == logprobs.topk(num_top).indices.tolist()
            assert entry.top_logprobs == pytest.approx(logprobs.topk(num_top).values.tolist(), abs=1e-6)
