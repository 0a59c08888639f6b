"""`baton bench layouts`: bytes that ranks take from each other for one request, beside what formulas say. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster.bench.layout_formulas import PAGE_SIZE, Layout, Moved, decode_bytes, prefill_bytes
from cluster.bench.random_checkpoint import write_checkpoint
from cluster.spec.config import DeployConfig, ParallelConfig
from cluster.spec.lifecycle import Role
from cluster.spec.registry import TransferMode
from cluster.spec.sampling import Stopping
from cluster.spec.strategy import CpMode, MoeDispatch, PassingSetting, Strategy
from workers.local import LocalCluster, Prompt
from workers.models.registry import read_model_config
from workers.traffic import Traffic

_POOLS = {"page_size": PAGE_SIZE, "memory_gib": 0.05}
_NUM_STEPS = 8
"""Of decode, behind the prompt."""

_CP2 = ParallelConfig(cp=2)
LAYOUTS = (
    Layout("cp=2", _CP2),
    Layout("cp=2 rank0", _CP2, sends=TransferMode.RANK0),
    Layout("cp=2 pass-KV", _CP2, mode=CpMode.RING, passing=PassingSetting.PASS_KV),
    Layout("cp=2 pass-KV cached", _CP2, mode=CpMode.RING, passing=PassingSetting.PASS_KV, has_prefix=True),
    Layout("cp=2 pass-Q cached", _CP2, mode=CpMode.RING, passing=PassingSetting.PASS_Q, has_prefix=True),
    Layout("cp=3", ParallelConfig(cp=3)),
    Layout("tp=2 to tp=1", ParallelConfig(tp=2)),
    Layout("tp=1 to tp=2", ParallelConfig(), ParallelConfig(tp=2)),
    Layout("cp=2 tp=2 to tp=2", ParallelConfig(cp=2, tp=2), ParallelConfig(tp=2)),
    Layout("pp=2", ParallelConfig(pp=2)),
    Layout("cp=2 pp=2 to pp=2", ParallelConfig(cp=2, pp=2), ParallelConfig(pp=2)),
    Layout("dp=2 to dp=2", ParallelConfig(dp=2), ParallelConfig(dp=2)),
    Layout("cp=2 ep=2", ParallelConfig(cp=2, ep=2)),
    Layout("tp=4 to dp=2 tp=2", ParallelConfig(tp=4), ParallelConfig(dp=2, tp=2)),
    Layout("tp=1 to tp=8", ParallelConfig(), ParallelConfig(tp=8)),
    Layout("tp=8 to tp=8", ParallelConfig(tp=8), ParallelConfig(tp=8)),
    Layout("dp=2 tp=2", ParallelConfig(dp=2, tp=2)),
    Layout("cp=2 tp=2 ep=2", ParallelConfig(cp=2, tp=2, ep=2)),
    Layout("cp=2 ep=2 sent", ParallelConfig(cp=2, ep=2), dispatch=MoeDispatch.ALL_TO_ALL),
    Layout("cp=2 tp=2 ep=2 sent", ParallelConfig(cp=2, tp=2, ep=2), dispatch=MoeDispatch.ALL_TO_ALL),
    Layout("cp=2 tp=2 ep=2 moe_dp=2", ParallelConfig(cp=2, tp=2, ep=2, moe_dp=2)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutBytes:
    """What one kind of traffic of one layout moved, over all ranks of one side."""

    layout: str
    side: Role
    traffic: str
    """A group of ranks, ``stages``, ``handoff`` or ``head_copies``."""
    layers: int
    """Layers that the bytes are of; 1 where they are not of layers."""
    measured_bytes: int
    expected_bytes: int
    beside_bytes: int
    """Of the expected ones, what no layer moves: the sum of the embedding, and logits."""

    @property
    def difference(self) -> float:
        """Part by which more, or less, was moved than expected; infinite where nothing was."""
        return self.measured_bytes / self.expected_bytes - 1 if self.expected_bytes else inf


def run_layouts(prompt_len: int, layouts: tuple[Layout, ...] = LAYOUTS) -> Iterator[LayoutBytes]:
    """Answer one request in every layout, in plain processes of this machine."""
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
    cluster.load(_config(layout, folder, prompt_len), folder)
    prompt = [1 + i % 50 for i in range(prompt_len)]
    cached = Prompt(prompt[: layout.cached_len(prompt_len)], Stopping(max_tokens=1))
    prompts = [cached] if cached.token_ids else []
    # Every run begins with empty caches, so that what is cached is computed again.
    moved_before = _moved(cluster, prompts)
    moved = _moved(cluster, [*prompts, Prompt(prompt, Stopping(max_tokens=1 + _NUM_STEPS))])
    model = read_model_config(folder)
    formulas = {
        Role.PREFILL: prefill_bytes(layout, model, prompt_len),
        Role.DECODE: decode_bytes(layout, model, prompt_len, _NUM_STEPS),
    }
    for side, expected in formulas.items():
        of_side = moved[side]
        of_side.subtract(moved_before[side])
        unexpected = {traffic: Moved(1, 0) for traffic, num in of_side.items() if num and traffic not in expected}
        for traffic, (layers, num_bytes, beside) in {**expected, **unexpected}.items():
            yield LayoutBytes(
                layout=layout.name,
                side=side,
                traffic=traffic,
                layers=layers,
                measured_bytes=of_side[traffic],
                expected_bytes=num_bytes,
                beside_bytes=beside,
            )


def _moved(cluster: LocalCluster, prompts: list[Prompt]) -> dict[Role, Traffic]:
    """What is moved while prompts are answered one after another."""
    before = {side: _totals(cluster, side) for side in Role}
    with cluster.running():
        for prompt in prompts:
            cluster.generate([prompt])
    after = {side: _totals(cluster, side) for side in Role}
    for side in Role:
        after[side].subtract(before[side])
    return after


def _config(layout: Layout, folder: Path, prompt_len: int) -> DeployConfig:
    return DeployConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "kv": _POOLS,
            "prefill": {
                "parallel": layout.prefill,
                "mode": layout.mode,
                "strategy": Strategy.ZIGZAG,
                "passing": layout.passing,
                "chunk_tokens": prompt_len,
                "moe_dispatch": layout.dispatch,
            },
            "decode": {"parallel": layout.decode, "moe_dispatch": layout.dispatch},
            "transfer": {"mode": layout.sends},
        }
    )


def _totals(cluster: LocalCluster, side: Role) -> Traffic:
    total = Traffic()
    for traffic in cluster.ask(side, "traffic"):
        total.update(traffic)
    return total
