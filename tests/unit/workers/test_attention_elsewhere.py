"""The torch backend on devices other than the CPU: near the definition, and with all that it makes on the device."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.fakes.kernel_cases import PagedCase, check_paged, check_rows, paged_cases
from tests.unit.workers.test_row_attention import rank_pairs
from workers import device
from workers.attention import extend, plain, single_tokens
from workers.attention.paged import flash
from workers.attention.plain import attend_plainly
from workers.attention.torch_backend import TorchAttention
from workers.context_parallel.runs import Run

RUNS = (Run(0, 3, 5, 4), Run(1, 40, 6, 1), Run(2, 7, 1, 1), Run(3, 30, 1, 1))


@pytest.fixture
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU what is for other devices; few scores at once."""
    monkeypatch.setattr(plain, "MOST_SCORES", 100)
    monkeypatch.setattr(extend, "attend_blocked", lambda *_: None)
    for module in (extend, single_tokens):
        monkeypatch.setattr(module, "flash", attend_plainly)


@pytest.mark.usefixtures("_elsewhere")
def test_pages() -> None:
    @settings(max_examples=40)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        check_paged(TorchAttention(), data.draw(paged_cases(200, torch.float32)), "cpu")

    check()


@pytest.mark.usefixtures("_elsewhere")
def test_rows() -> None:
    @settings(max_examples=40)
    @given(rank_pairs())
    def check(case: tuple[list[Run], list[Run]]) -> None:
        check_rows(TorchAttention(), case, 2, torch.float32, "cpu")

    check()


@pytest.mark.parametrize("num_keys", [1, 7, 40])
@pytest.mark.parametrize("most_scores", [1, 90, 1 << 20])
def test_it_is_what_the_kernel_of_cpus_computes(
    num_keys: int, most_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A triangle that is cut off at either side, too."""
    monkeypatch.setattr(plain, "MOST_SCORES", most_scores)
    torch.manual_seed(0)
    query, (key, value) = torch.randn(2, 3, 20, 16), torch.randn(2, 2, 3, num_keys, 16)
    bias = torch.zeros(2, 1, 1, num_keys)
    bias[1, ..., num_keys // 2 + 1 :] = -torch.inf
    for found, expected in (
        (attend_plainly(query, key, value), flash(query, key, value)),
        (attend_plainly(query, key, value, causal=True), flash(query, key, value, causal=True)),
        (attend_plainly(query, key, value, bias=bias), flash(query, key, value, bias=bias)),
    ):
        torch.testing.assert_close(tuple(found), tuple(expected))


def test_only_the_result_is_rounded() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 3, 20, 16).bfloat16()
    out, lse = attend_plainly(query, key, value, causal=True)
    wanted = attend_plainly(query.float(), key.float(), value.float(), causal=True)
    assert torch.equal(out, wanted.out.bfloat16())
    assert torch.equal(lse, wanted.lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_lens", [None, (20, 60, 0, 31)])
def test_all_is_made_on_the_device_and_nobody_waits(
    key_lens: tuple[int, ...] | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without content, of which none goes together with one that has some, and nothing can be known."""
    monkeypatch.setattr(device, "on_device", lambda tensor, _: tensor.to("meta"))
    monkeypatch.setattr(single_tokens, "on_device", device.on_device)
    tables = [torch.empty(9, dtype=torch.int64, device="meta")] * 4
    query = torch.empty(13, 4, 64, dtype=dtype, device="meta")
    pages = torch.empty(40, 2, 16, 64, dtype=dtype, device="meta")
    backend = TorchAttention()
    for out, lse in (
        backend.prepare(RUNS, tables, 16, key_lens).attend(query, pages, pages),
        backend.prepare_rows(RUNS, RUNS).attend(query, query[:, :2], query[:, 2:]),
    ):
        assert (out.shape, out.device.type, out.dtype) == (query.shape, "meta", dtype)
        assert (lse.shape, lse.device.type, lse.dtype) == (query.shape[:2], "meta", torch.float32)


def test_a_gpus_default_device_is_no_trap(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a rank times itself."""
    sent: list[Tensor] = []

    def on_device(tensor: Tensor, _: torch.device) -> Tensor:
        assert tensor.device.type == "cpu"
        sent.append(tensor)
        return tensor.to("meta")

    for module in (device, single_tokens):
        monkeypatch.setattr(module, "on_device", on_device)
    case = PagedCase(RUNS)
    with torch.device("meta"):
        pages = torch.empty(40, 2, case.page_size, 64)
        tables = [torch.empty(9, dtype=torch.int64)] * 4
        TorchAttention().prepare(case.runs, tables, case.page_size).attend(torch.empty(13, 4, 64), pages, pages)
    assert sent
