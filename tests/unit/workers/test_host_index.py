"""Eviction of pages from host memory."""

from workers.hicache.policy.host_index import HostIndex


def test_the_least_recently_used_page_is_evicted_unless_pinned_or_held() -> None:
    index = HostIndex(3, 1)
    for key in (b"a", b"b", b"c"):
        assert index.reserve(key, 0) is not None
        index.fill(key)
    index.touch([b"a"])
    index.pin([b"b"], is_pinned=True)
    index.reserve(b"d", 0)
    assert [index.page_of(key) for key in (b"b", b"a", b"c")] == [1, 0, None]
    index.hold([b"a"])
    assert index.reserve(b"e", 0) is None
    index.release([b"a"])
    assert index.reserve(b"e", 0) == 0
    index.flush()
    assert index.filled_keys() == [b"b"]
    index.check_integrity()
