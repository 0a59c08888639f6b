"""`baton bench layouts`: bytes that ranks take from each other for one prompt, beside what formulas say. No torch.

Formulas are those of all-gather, all-reduce and reduce-scatter over N ranks, each of which receives phi = (N-1)/N of
the whole. In the last layer only sampled tokens have queries, so that only K and V travel there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster.bench.random_checkpoint import write_checkpoint
from cluster.spec.config import DeployConfig, ParallelConfig
from cluster.spec.kv import pages_for
from cluster.spec.lifecycle import Role
from cluster.spec.ranks import GroupName, kv_heads_of
from cluster.spec.sampling import Stopping
from cluster.spec.strategy import CpMode, MoeDispatch, Strategy
from workers.local import LocalCluster, Prompt
from workers.models.config import ModelConfig
from workers.traffic import HANDOFF, STAGES, Traffic

PAGE_SIZE = 16
ITEMSIZE = 4
ROUTE_BYTES = 8
"""Number and weight of one chosen expert of one token."""
_POOLS = {"page_size": PAGE_SIZE, "memory_gib": 0.05}


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to cut prefill and decode."""

    name: str
    prefill: ParallelConfig
    decode: ParallelConfig = field(default_factory=ParallelConfig)
    mode: CpMode = CpMode.GATHER

    @property
    def has_experts(self) -> bool:
        """Whether it takes a model with experts."""
        return self.prefill.ep > 1


LAYOUTS = (
    Layout("cp=2", ParallelConfig(cp=2)),
    Layout("cp=2 ring", ParallelConfig(cp=2), mode=CpMode.RING),
    Layout("cp=3", ParallelConfig(cp=3)),
    Layout("tp=2 to tp=1", ParallelConfig(tp=2)),
    Layout("tp=1 to tp=2", ParallelConfig(), ParallelConfig(tp=2)),
    Layout("cp=2 tp=2 to tp=2", ParallelConfig(cp=2, tp=2), ParallelConfig(tp=2)),
    Layout("pp=2", ParallelConfig(pp=2)),
    Layout("cp=2 pp=2 to pp=2", ParallelConfig(cp=2, pp=2), ParallelConfig(pp=2)),
    Layout("dp=2 to dp=2", ParallelConfig(dp=2), ParallelConfig(dp=2)),
    Layout("cp=2 ep=2", ParallelConfig(cp=2, ep=2)),
    Layout("tp=4", ParallelConfig(tp=4)),
    Layout("tp=1 to tp=8", ParallelConfig(), ParallelConfig(tp=8)),
    Layout("dp=2 tp=2", ParallelConfig(dp=2, tp=2)),
    Layout("cp=2 tp=2 ep=2", ParallelConfig(cp=2, tp=2, ep=2)),
    Layout("cp=2 tp=2 ep=2 moe_dp=2", ParallelConfig(cp=2, tp=2, ep=2, moe_dp=2)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutBytes:
    """What one kind of traffic of one layout moved, over all ranks."""

    layout: str
    traffic: str
    """A group of ranks, ``stages`` or ``handoff``."""
    layers: int
    """Layers that the bytes are of; 1 where they are of the whole prompt."""
    measured_bytes: int
    expected_bytes: int

    @property
    def difference(self) -> float:
        """Part by which more, or less, was moved than expected; infinite where nothing was."""
        return self.measured_bytes / self.expected_bytes - 1 if self.expected_bytes else inf


def run_layouts(prompt_len: int, layouts: tuple[Layout, ...] = LAYOUTS) -> Iterator[LayoutBytes]:
    """Compute one prompt in every layout, in plain processes of this machine."""
    cluster = LocalCluster()
    try:
        with TemporaryDirectory() as root:
            folders = {has: Path(root, str(has)) for has in {layout.has_experts for layout in layouts}}
            for has_experts, folder in folders.items():
                write_checkpoint(folder, has_experts=has_experts)
            for layout in layouts:
                yield from _run(cluster, layout, folders[layout.has_experts], prompt_len)
    finally:
        cluster.close()


def _run(cluster: LocalCluster, layout: Layout, folder: Path, prompt_len: int) -> Iterator[LayoutBytes]:
    config = _config(layout, folder, prompt_len)
    cluster.load(config, folder)
    before = _totals(cluster)
    with cluster.running():
        cluster.generate([Prompt([1 + i % 50 for i in range(prompt_len)], Stopping(max_tokens=1))])
    moved = _totals(cluster)
    moved.subtract(before)
    model = ModelConfig.from_folder(folder)
    formulas = _expected(layout, model, prompt_len)
    unexpected = {traffic: (1, 0) for traffic, num_bytes in moved.items() if num_bytes and traffic not in formulas}
    for traffic, (layers, expected) in {**formulas, **unexpected}.items():
        yield LayoutBytes(
            layout=layout.name,
            traffic=traffic,
            layers=layers,
            measured_bytes=moved[traffic],
            expected_bytes=expected,
        )


def _config(layout: Layout, folder: Path, prompt_len: int) -> DeployConfig:
    return DeployConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "kv": _POOLS,
            "prefill": {
                "parallel": layout.prefill,
                "mode": layout.mode,
                "strategy": Strategy.ZIGZAG,
                "passing": "pass_kv" if layout.mode is CpMode.RING else "auto",
                "chunk_tokens": prompt_len,
                "moe_dispatch": MoeDispatch.GATHER,
            },
            "decode": {"parallel": layout.decode},
        }
    )


def _totals(cluster: LocalCluster) -> Traffic:
    total = Traffic()
    for traffic in cluster.ask(Role.PREFILL, "traffic"):
        total.update(traffic)
    return total


def _expected(layout: Layout, model: ModelConfig, prompt_len: int) -> dict[str, tuple[int, int]]:
    """By traffic: the layers it is of, and bytes over all ranks."""
    sizes, others = layout.prefill, model.num_layers - 1
    hidden_bytes = prompt_len * model.hidden_size * ITEMSIZE
    heads = len(kv_heads_of(model.num_kv_heads, sizes.tp, 0))
    kv_bytes = prompt_len * 2 * heads * model.head_dim * ITEMSIZE
    expected = {}
    if sizes.cp > 1:
        expected[GroupName.ATTN_CP.value] = (model.num_layers, model.num_layers * sizes.tp * (sizes.cp - 1) * kv_bytes)
    if sizes.tp > 1:
        # Two sums a layer, and that of the embedding.
        expected[GroupName.ATTN_TP.value] = (others, (2 * others + 1) * 2 * (sizes.tp - 1) * hidden_bytes)
    if sizes.dp > 1:
        # The prompt is on one DP rank: its tokens go to all others, and their terms of the MLP come home.
        expected[GroupName.ATTN_DP.value] = (others, others * 2 * sizes.tp * (sizes.dp - 1) * hidden_bytes)
    if sizes.pp > 1:
        expected[STAGES] = (1, (sizes.pp - 1) * sizes.tp * hidden_bytes)
    shards = sizes.dp * sizes.cp // sizes.moe_dp
    if model.moe is not None and shards > 1:
        routed_bytes = hidden_bytes + prompt_len * model.moe.num_chosen * ROUTE_BYTES
        expected[GroupName.MOE_SHARDS.value] = (
            others,
            others * sizes.tp * (shards - 1) * (routed_bytes + hidden_bytes),
        )
    expected[HANDOFF] = (1, _handoff_bytes(model, layout, prompt_len))
    return expected


def _handoff_bytes(model: ModelConfig, layout: Layout, prompt_len: int) -> int:
    """Each KV head once for every decode rank that holds it, which is several where tp > KV heads: whole pages."""
    copies = max(1, layout.decode.tp // model.num_kv_heads)
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * ITEMSIZE
    return copies * token_bytes * pages_for(prompt_len, PAGE_SIZE) * PAGE_SIZE
