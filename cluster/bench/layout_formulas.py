"""What ranks of any layout take from each other, by formula; see `baton bench layouts`. Pure arithmetic, no torch.

Over N ranks an all-gather brings each phi = (N-1)/N of the whole, and so do a reduce-scatter and each half of an
all-reduce; a sum that is small enough is read whole from everybody, which is more bytes and fewer waits. Pass-KV brings
the cached keys of all ranks as well; pass-Q brings queries, what they have found, and the new keys, for the new tokens
among themselves. In the last layer of a prompt only sampled tokens have queries, so that only K and V travel there;
pass-Q takes it as any other.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.spec.config import ParallelConfig
from cluster.spec.kv import pages_for
from cluster.spec.ranks import GroupName, head_copies, kv_heads_of
from cluster.spec.registry import TransferMode
from cluster.spec.strategy import CpMode, MoeDispatch, PassingSetting
from workers.models.interface import DecoderConfig
from workers.traffic import HANDOFF, HEAD_COPIES, STAGES, WHOLE_SUM_BYTES

PAGE_SIZE = 16
ITEMSIZE = 4
ROUTE_BYTES = 8
"""Number and weight of one chosen expert of one token."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to cut prefill and decode."""

    name: str
    prefill: ParallelConfig
    decode: ParallelConfig = field(default_factory=ParallelConfig)
    mode: CpMode = CpMode.GATHER
    passing: PassingSetting = PassingSetting.AUTO
    sends: TransferMode = TransferMode.ALL_RANKS
    dispatch: MoeDispatch = MoeDispatch.GATHER
    has_prefix: bool = False
    """Three quarters of the prompt are cached."""

    @property
    def has_experts(self) -> bool:
        """Whether it takes a model with experts."""
        return self.prefill.ep > 1

    def cached_len(self, prompt_len: int) -> int:
        """Tokens of the prompt that are cached."""
        return prompt_len * 3 // 4 // PAGE_SIZE * PAGE_SIZE if self.has_prefix else 0


class Pass(NamedTuple):
    """Layers that some tokens, all of one request, go through."""

    num_tokens: int
    num_layers: int
    """Those in which every token has queries."""
    is_prompt: bool = True


class Moved(NamedTuple):
    """Bytes over all ranks, and the layers that they are of; 1 where they are not of layers."""

    layers: int
    num_bytes: int
    beside_bytes: int = 0
    """Of these, what no layer moves: the sum of the embedding, and logits."""


Expected = dict[str, Moved]
"""By the name of a group of ranks, or ``stages``, ``handoff``, ``head_copies``."""


def prefill_bytes(layout: Layout, model: DecoderConfig, prompt_len: int) -> Expected:
    """Of one prompt, from its tokens to decode's pages."""
    num_new = prompt_len - layout.cached_len(prompt_len)
    sizes, passes_q = layout.prefill, layout.passing is PassingSetting.PASS_Q
    expected = _stage_bytes(sizes, model, Pass(num_new, model.num_layers - 1 + passes_q), layout.dispatch)
    if sizes.cp > 1:
        passed_len = prompt_len if layout.mode is CpMode.RING and not passes_q else num_new
        num_bytes = sizes.tp * (sizes.cp - 1) * passed_len * _row_bytes(sizes, model, passes_q)
        expected[GroupName.ATTN_CP.value] = Moved(model.num_layers, model.num_layers * num_bytes)
    return expected | {HANDOFF: Moved(1, _page_bytes(layout, model, prompt_len))}


def decode_bytes(layout: Layout, model: DecoderConfig, prompt_len: int, num_steps: int) -> Expected:
    """Of so many steps of one request behind its prompt."""
    sizes = layout.decode
    expected = _stage_bytes(sizes, model, Pass(1, model.num_layers, is_prompt=False), layout.dispatch, num_steps)
    copies = head_copies(model.num_kv_heads, sizes.tp)
    if copies > 1:
        expected[HEAD_COPIES] = Moved(1, (copies - 1) * _page_bytes(layout, model, prompt_len))
    return expected


def _stage_bytes(
    sizes: ParallelConfig, model: DecoderConfig, given: Pass, dispatch: MoeDispatch, num_steps: int = 1
) -> Expected:
    """Between the ranks that share layers, and from stage to stage."""
    num_tokens, layers, _ = given
    hidden_bytes = num_tokens * model.hidden_size * ITEMSIZE
    a_layer, beside = Counter[str](), Counter[str]()
    shards = sizes.dp * sizes.cp // sizes.moe_dp
    goes_to_experts = model.moe is not None and shards > 1
    is_sent = goes_to_experts and dispatch is MoeDispatch.ALL_TO_ALL
    if sizes.tp > 1:
        # After attention and the MLP; answers of experts that tokens were sent to are gathered.
        cp = sizes.cp if given.is_prompt else 1
        a_sum = cp * _sum_bytes(hidden_bytes // cp, sizes.tp)
        a_layer[GroupName.ATTN_TP] += a_sum + ((sizes.tp - 1) * hidden_bytes if is_sent else a_sum)
        beside[GroupName.ATTN_TP] += a_sum + (sizes.tp - 1) * model.vocab_size * ITEMSIZE
    if sizes.dp > 1 and not goes_to_experts:
        # The request is on one DP rank: its tokens go to all others, and their terms of the MLP come home.
        a_layer[GroupName.ATTN_DP] += 2 * sizes.tp * (sizes.dp - 1) * hidden_bytes
    if model.moe is not None and goes_to_experts:
        routed_bytes = hidden_bytes + num_tokens * model.moe.top_k * ROUTE_BYTES
        block = shards * sizes.tp
        name, ways = (GroupName.MOE_BLOCK, block - 1) if is_sent else (GroupName.MOE_SHARDS, sizes.tp * (shards - 1))
        a_layer[name] += ways * (routed_bytes + hidden_bytes)
    expected = {
        str(name): Moved(layers, num_steps * (layers * num_bytes + beside[name]), num_steps * beside[name])
        for name, num_bytes in a_layer.items()
    }
    if sizes.pp > 1:
        expected[STAGES] = Moved(1, num_steps * (sizes.pp - 1) * sizes.tp * hidden_bytes)
    return expected


def _sum_bytes(num_bytes: int, size: int) -> int:
    """Of one all-reduce, over all ranks."""
    return (size - 1) * num_bytes * (size if num_bytes <= WHOLE_SUM_BYTES else 2)


def _row_bytes(sizes: ParallelConfig, model: DecoderConfig, passes_q: bool) -> int:
    """What a CP rank tells another of one token in one layer: K and V; with pass-Q also Q, and what it has found."""
    kv_bytes = 2 * len(kv_heads_of(model.num_kv_heads, sizes.tp, 0)) * model.head_dim * ITEMSIZE
    num_heads = model.num_heads // sizes.tp
    return kv_bytes + passes_q * num_heads * (model.head_dim * ITEMSIZE + (model.head_dim + 1) * 4)


def _page_bytes(layout: Layout, model: DecoderConfig, prompt_len: int) -> int:
    """KV of the whole pages that decode has not got: each byte once, however many ranks hold the same heads."""
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * ITEMSIZE
    return token_bytes * (pages_for(prompt_len, PAGE_SIZE) * PAGE_SIZE - layout.cached_len(prompt_len))
