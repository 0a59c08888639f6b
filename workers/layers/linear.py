"""Linear layers and embeddings, sharded over TP ranks or computed in full by every rank, and norms."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.kernels.elementwise import elementwise_kernels
from workers.layers.matmul import Matrix, PackedMatrix, multiply, packed
from workers.layers.shard import Shard, ShardedLayer, WeightShard, even_shard, replicated
from workers.native.library import Library
from workers.parallel.communicator import Communicator
from workers.quant.fp8_matrix import Fp8Matrix, split_rows


class LinearLayer(ShardedLayer):
    """Linear layer, whose weight can be packed or in FP8."""

    def __init__(self, num_outputs: int, num_inputs: int) -> None:
        super().__init__()
        self.weight: Matrix = nn.Parameter(torch.empty(num_outputs, num_inputs), requires_grad=False)

    @property
    def loadable(self) -> Tensor | Fp8Matrix:
        """Return the weight, which must not be packed yet."""
        assert not isinstance(self.weight, PackedMatrix), "the weight is packed"
        return self.weight

    def pack(self, library: Library | None) -> None:
        """Rearrange a loaded weight for speed."""
        if isinstance(self.weight, Tensor) and isinstance(matrix := packed(self.weight, library), PackedMatrix):
            del self.weight  # a parameter
            self.weight = matrix


class FusedLinear(LinearLayer):
    """Several projections of one input in one product. Each rank computes a shard of every projection's outputs."""

    def __init__(self, in_size: int, outputs: Mapping[str, Shard], *, bias: bool) -> None:
        """Build the layer. ``outputs`` maps each projection's name to this rank's shard of its outputs."""
        out_size = sum(shard.size for shard in outputs.values())
        super().__init__(out_size, in_size)
        self.bias = nn.Parameter(torch.empty(out_size), requires_grad=False) if bias else None
        self._in_size, self._outputs = in_size, dict(outputs)
        self._parts: dict[tuple[int | None, int | None], PackedMatrix] = {}
        """Parts of a packed weight by slice of the outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.bias)

    def project(self, x: Tensor, outputs: slice) -> Tensor:
        bias, weight = None if self.bias is None else self.bias[outputs], self.weight
        if not isinstance(weight, PackedMatrix):
            return multiply(x, weight[outputs], bias)
        bounds = outputs.start, outputs.stop
        if bounds not in self._parts:
            self._parts[bounds] = weight.part(outputs)
        return multiply(x, self._parts[bounds], bias)

    def weights(self) -> Iterator[tuple[str, WeightShard]]:
        sizes, inputs = [shard.size for shard in self._outputs.values()], replicated(self._in_size)
        for (name, shard), part in zip(self._outputs.items(), split_rows(self.loadable, sizes), strict=True):
            yield f"{name}.weight", WeightShard(part, (shard, inputs), "weight")
        if self.bias is not None:
            for (name, shard), bias in zip(self._outputs.items(), torch.split(self.bias, sizes), strict=True):
                yield f"{name}.bias", WeightShard(bias, (shard,))


class SummedLinear(LinearLayer):
    """Linear layer with sharded inputs. Each rank computes one term of every output."""

    def __init__(self, inputs: Shard, out_size: int, *, bias: bool) -> None:
        super().__init__(out_size, inputs.size)
        self.bias = nn.Parameter(torch.empty(out_size), requires_grad=False) if bias else None
        self._inputs = inputs

    def forward(self, x: Tensor, add_up: Callable[[Tensor], Tensor]) -> Tensor:
        """Project ``x``. ``add_up`` sums the terms of all ranks."""
        out = add_up(multiply(x, self.weight))
        return out if self.bias is None else out.add_(self.bias)

    def weights(self) -> Iterator[tuple[str, WeightShard]]:
        out = replicated(self.weight.shape[0])
        yield "weight", WeightShard(self.loadable, (out, self._inputs), "weight")
        if self.bias is not None:
            yield "bias", WeightShard(self.bias, (out,))


class ReplicatedLinear(LinearLayer):
    """Linear layer without bias that every rank computes in full."""

    def __init__(self, in_size: int, out_size: int, *, is_wide: bool = False) -> None:
        """Build the layer. With ``is_wide``, its weights and outputs are in fp32 for any model dtype."""
        super().__init__(out_size, in_size)
        self.wide = frozenset({"weight"} if is_wide else ())

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x.float() if self.wide else x, self.weight)

    def weights(self) -> Iterator[tuple[str, WeightShard]]:
        shards = tuple(map(replicated, self.weight.shape))
        yield "weight", WeightShard(self.loadable, shards, None if self.wide else "weight")


class Embedding(ShardedLayer):
    """Table [vocab_size, hidden_size] that embeds token ids or scores every token, sharded over the vocabulary."""

    def __init__(self, vocab_size: int, hidden_size: int, group: Communicator) -> None:
        super().__init__()
        self._tokens, self._group = even_shard(vocab_size, group), group
        self.weight = nn.Parameter(torch.empty(self._tokens.size, hidden_size), requires_grad=False)
        self.packed: Matrix | None = None
        """Packed table, for ``scores``."""

    def forward(self, token_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return functional.embedding(token_ids, self.weight)
        rows = token_ids - self._tokens.start
        is_elsewhere = (rows < 0) | (rows >= self._tokens.size)
        found = functional.embedding(rows.masked_fill(is_elsewhere, 0), self.weight)
        return self._group.all_reduce(found.masked_fill_(is_elsewhere[:, None], 0))

    def scores(self, hidden: Tensor) -> Tensor:
        """Map hidden [R, hidden_size], the same on all ranks, to [R, vocab_size] in the table's dtype."""
        own = multiply(hidden, self.weight if self.packed is None else self.packed)
        if self._group.size == 1:
            return own
        size, num_tokens = self._group.size, self._tokens.size
        parts = own.new_empty(size * len(own), num_tokens)
        self._group.all_gather(parts, own)
        by_row = parts.view(size, len(own), num_tokens).transpose(0, 1).reshape(len(own), size * num_tokens)
        return by_row[:, : self._tokens.whole].contiguous()

    def pack(self, library: Library | None, *, is_read: bool) -> None:
        """Pack the table for ``scores``. With ``is_read``, keep the plain table too, to embed token ids."""
        self.packed = packed(self.weight, library)
        if not is_read and isinstance(self.packed, PackedMatrix):
            del self.weight

    def weights(self) -> Iterator[tuple[str, WeightShard]]:
        yield "weight", WeightShard(self.weight, (self._tokens, replicated(self.weight.shape[1])))


class RMSNorm(ShardedLayer):
    """RMSNorm over the last dimension.

    Values are normalized in fp32 and cast back before scaling. In bf16, the opposite order would give different bits.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if (kernels := elementwise_kernels(x)) is not None:
            return kernels.rms_norm(x, self.weight, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)

    def of_sum(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + y, each [rows, size], and the normalized sum. If ``y`` is None, it counts as zero."""
        if y is None:
            return x, self(x)
        if (kernels := elementwise_kernels(x)) is not None:
            return kernels.add_rms_norm(x, y, self.weight, self.eps)
        total = x + y
        return total, self(total)


class LayerNorm(ShardedLayer):
    """Layer normalization with a bias over the last dimension, computed in fp32 and cast back last."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)
