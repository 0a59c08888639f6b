"""Allocation for models with one lifetime, whose pages form one list."""

from collections.abc import Sequence

from workers.cache.page_allocator import Demand, PageAllocator


def allocate(allocator: PageAllocator, count: int, shared: Sequence[int] = (), first_owner: int = 0) -> list[int]:
    """Return the shared pages followed by new ones."""
    (new,) = allocator.allocate([_demand(count, shared, first_owner)], shared)
    return [*shared, *new]


def can_allocate(allocator: PageAllocator, count: int, shared: Sequence[int] = (), first_owner: int = 0) -> bool:
    """Return whether ``allocate`` can be called."""
    return allocator.can_allocate([_demand(count, shared, first_owner)], shared)


def _demand(count: int, shared: Sequence[int], first_owner: int) -> Demand:
    return count - len(shared), first_owner + len(shared)
