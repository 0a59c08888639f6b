"""The flash_attn backend with a fake that implements the package's documented behavior and counts calls."""

import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fakes.attention_params import params_for
from tests.fakes.devices import MetaDevice
from tests.fakes.kernel_cases import PagedCase, check_paged
from tests.unit.workers.test_row_attention import masked_attention
from workers import device
from workers.attention.interface import AttentionBackend
from workers.attention.runs import Run


class Package(ModuleType):
    """The only function in use. Causal runs end with the same token, and tables hold pages ``[page, slot, H, D]``."""

    calls = 0

    def flash_attn_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, most_q: int, most_k: int, **options: Any
    ) -> tuple[Tensor, Tensor, None]:
        self.calls += 1
        parts = []
        for number, (queries, keys) in enumerate(
            zip(pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True)
        ):
            num_queries, num_keys = queries[1] - queries[0], keys[1] - keys[0]
            assert num_queries <= most_q
            assert num_keys <= most_k
            seen = np.ones((num_queries, num_keys), dtype=np.bool_)
            if options["causal"]:
                seen = np.tril(seen, num_keys - num_queries)
            table = options["block_table"]
            key, value = (
                x[slice(*keys)] if table is None else x[table[number].long()].flatten(0, 1)[:num_keys] for x in (k, v)
            )
            parts.append(masked_attention(q[slice(*queries)], key, value, seen, options["softmax_scale"]))
        out, lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return out.to(q.dtype), lse.float().T, None


@pytest.fixture(scope="module")
def package() -> Iterator[Package]:
    with pytest.MonkeyPatch.context() as patch:
        fake = Package("flash_attn")
        patch.setitem(sys.modules, "flash_attn", fake)
        patch.delitem(sys.modules, "workers.attention.flash_attn_backend", raising=False)
        yield fake
    sys.modules.pop("workers.attention.flash_attn_backend", None)


@pytest.fixture(scope="module")
def backend(package: Package) -> AttentionBackend:  # noqa: ARG001 - it must be there first
    from workers.attention.flash_attn_backend import FlashAttention

    return FlashAttention()


@pytest.mark.parametrize(
    ("case", "calls"),
    [
        (PagedCase((Run(1, 300, 1, 1), Run(0, 37, 5, 1)), page_size=256), 1),
        (PagedCase((Run(0, 3, 5, 4), Run(1, 1, 1, 1)), page_size=256, key_lens=(20, 260)), 1),
        (PagedCase((Run(0, 3, 5, 4),), page_size=256), 0),
        (PagedCase((Run(0, 3, 5, 1), Run(1, 0, 1, 1)), page_size=256, key_lens=(20, 0)), 0),
    ],
    ids=["causal", "prefixes", "in steps", "a prefix of nothing"],
)
def test_pages(backend: AttentionBackend, package: Package, case: PagedCase, calls: int) -> None:
    before = package.calls
    check_paged(backend, case, "cpu")
    assert package.calls - before == calls


def test_a_default_device_is_left_alone(backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank measures itself with its GPU as the default device. Only host tensors can be sent without a wait."""
    from workers.attention import flash_attn_backend

    sent: list[Tensor] = []

    class NotedMeta(MetaDevice):
        def put(self, on_host: Tensor) -> Tensor:
            sent.append(super().put(on_host))
            return sent[-1]

    def varlen(query: Tensor, *rest: Any, **_: Any) -> tuple[Tensor, Tensor, None]:
        _key, _value, *ends, most_queries, most_keys = rest
        assert [end is tensor for end, tensor in zip(ends, sent, strict=True)] == [True, True]
        assert (most_queries, most_keys) == (37, 337)
        return query, query.new_empty(query.shape[1::-1]), None

    monkeypatch.setitem(device._DEVICES, torch.device("meta"), NotedMeta(has_kernels=False))
    monkeypatch.setattr(flash_attn_backend, "flash_attn_varlen_func", varlen)
    with torch.device("meta"):
        step = backend.prepare([Run(0, 300, 37, 1)], [torch.full((2,), 7)], 256)
        pages = torch.empty(8, 1, 256, 64)
        for _ in range(3):
            query = torch.empty(37, 4, 64)
            assert step.attend(query, pages, pages, params_for(query)).lse.shape == (37, 4)
    assert len(sent) == 2
