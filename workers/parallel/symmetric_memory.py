"""Small sums of GPUs of one host: each reads the terms of all others where they lie, in memory that torch maps for it.

Owns one buffer of one group. NCCL takes larger sums, everything else, and all of it where this is not to be had.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from cluster.spec.errors import UserError
from workers.parallel.same_host import host_identity
from workers.parallel.words import exchange

READ_BYTES = 2 << 20
"""Most that a rank reads of the others in one sum, where a ring would move less of a large one; not measured."""
TRIAL_S = 30.0
"""Longest wait for the first sum."""

_log = logging.getLogger(__name__)

_kept: list[Tensor] = []
"""Buffers in use, to the end of the process: to free one, torch waits for a GPU that may wait for a dead peer."""


def largest_sum(size: int) -> int:
    """Elements of the largest sum of so many ranks, in units that the GPU reads at once (16 bytes)."""
    return READ_BYTES // (size - 1) // 16 * 4


class SymmetricMemory:
    """What we use of torch's symmetric memory, all of it under private names there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def place(self) -> str:
        """The host, and behind the last space the GPU; other than anybody's where the host is not known."""
        return f"{host_identity() or f'process {os.getpid()}'} {torch.cuda.get_device_properties(self.device).uuid}"

    def allocate(self, num_elements: int) -> Tensor:
        """A buffer in fp32 that peers can map; RuntimeError where the device has none."""
        return c10d._SymmetricMemory.empty_strided_p2p((num_elements,), (1,), torch.float32, self.device)

    def map(self, buffer: Tensor, name: str, group: dist.ProcessGroup) -> None:
        """Map the buffers of all members, each of which calls this with its own; RuntimeError where that fails."""
        # A worker sees one GPU, its first, and torch would take those of all for the same.
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        # The switch could add up, but in an order of its own.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        # Torch looks for rank, size and store of a group by its name.
        c10d._register_process_group(name, group)  # type: ignore[arg-type]  # the stubs have a name for names
        c10d._SymmetricMemory.rendezvous(buffer, name)

    def add_up(self, terms: Tensor, name: str) -> Tensor:
        """The sum of what all members have at the same place of their buffers, in fp32 and in the order of ranks."""
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce(terms, "sum", name)
        return total

    def forget(self, name: str) -> None:
        """The name may be another group's."""
        c10d._unregister_process_group(name)  # type: ignore[arg-type]


class SmallSums:
    """Sums of a group, one after another on the stream at hand; a CUDA graph may record them.

    The kernel that adds up begins to read when all ranks have come to it, and ends when all have read: so it sees what
    was written before, and what is written after cannot come too early.
    """

    def __init__(self, memory: SymmetricMemory, store: Store, name: str, rank: int, size: int) -> None:
        self._memory, self._name, self._rank, self._size = memory, name, rank, size
        self._store = PrefixStore(f"{name}/symmetric_memory", store)
        self._group: dist.ProcessGroup | None = None
        """Held here: torch knows it only as long as somebody else does."""
        self._buffer: Tensor | None = None

    def allocate(self) -> None:
        """The first of three steps, which every rank takes when all have taken the one before."""
        self._buffer = self._memory.allocate(largest_sum(self._size))

    def map(self) -> None:
        """The second, in which all ranks meet."""
        assert self._buffer is not None
        self._group = dist.ProcessGroup(self._store, self._rank, self._size)
        self._memory.map(self._buffer, self._name, self._group)
        _kept.append(self._buffer)

    def try_out(self) -> None:
        """The third: sums like any other; RuntimeError when one is wrong."""
        device, wrong = self._memory.device, []
        for turn in range(2):
            each = torch.arange(largest_sum(self._size), dtype=torch.float32, device=device) % 1000 + turn
            total = each + self._rank
            self.add_up(total)
            _wait_for(device, self._name)
            if not torch.equal(total, each * self._size + self._size * (self._size - 1) // 2):
                wrong.append(turn)
        if wrong:  # only now: the others wait in every sum
            raise RuntimeError(f"sums {wrong} were wrong")

    def holds(self, tensor: Tensor) -> bool:
        """Whether a sum goes this way; alike on all ranks, since the length is."""
        return self._buffer is not None and tensor.numel() <= len(self._buffer)

    def add_up(self, tensor: Tensor) -> int:
        """Replace a contiguous tensor by the sum of every rank's; returns how many bytes this one reads of others."""
        assert self._buffer is not None
        terms = self._buffer[: tensor.numel()].view(tensor.shape)
        terms.copy_(tensor)
        tensor.copy_(self._memory.add_up(terms, self._name))
        return (self._size - 1) * terms.nbytes

    def leave(self) -> None:
        """Whoever waits in a sum for this rank goes on waiting, until its process ends."""
        self._memory.forget(self._name)


def meet_for_sums(memory: SymmetricMemory, store: Store, name: str, rank: int, size: int) -> SmallSums | None:
    """Set the small sums of a group up, on every rank or on none; every rank calls this, and says so in its log.

    Raises:
        UserError: a GPU waits for another one in vain.
        RuntimeError: a rank does not come.
    """
    sums = SmallSums(memory, store, name, rank, size)
    reason = _why_apart(exchange(store, f"{name}/place", rank, size, memory.place()))
    for step in (sums.allocate, sums.map, sums.try_out):
        if not reason:
            told = exchange(store, f"{name}/{step.__name__}", rank, size, _problem(step))
            reason = "; ".join(f"rank {peer}: {problem}" for peer, problem in enumerate(told) if problem)
    if reason:
        sums.leave()
        _log.warning("sums of group %s go over NCCL, not through symmetric memory: %s", name, reason)
        return None
    _log.info("sums of group %s go through symmetric memory up to %d elements", name, largest_sum(size))
    return sums


def _why_apart(places: Sequence[str]) -> str:
    hosts, _, gpus = zip(*(place.rpartition(" ") for place in places), strict=True)
    if len(set(hosts)) > 1:
        return "its ranks are not known to share a host"
    return "" if len(set(gpus)) == len(gpus) else "some of its ranks share a GPU"


def _problem(step: Callable[[], None]) -> str:
    try:
        step()
    except (RuntimeError, AttributeError, TypeError) as error:  # the last two where torch has other private names
        return f"{step.__name__}: {(str(error) or repr(error)).splitlines()[0]}"
    return ""


def _wait_for(device: torch.device, name: str) -> None:
    """For all that the GPU was given; no kernel that waits for a peer ends by itself."""
    if device.type != "cuda":
        return
    there, end_s = torch.cuda.current_stream(device).record_event(), time.monotonic() + TRIAL_S
    while not there.query():
        if time.monotonic() > end_s:
            raise UserError(
                f"resources.symmetric_memory: got true, but a sum of group {name} did not end within {TRIAL_S:g} s; "
                "allowed between these GPUs: false"
            )
        time.sleep(0.001)
