"""A key set holds what a plain set would."""

from hypothesis import given
from hypothesis import strategies as st

from router.page_index import KeySet

_KEYS = st.lists(st.binary(min_size=2, max_size=2), max_size=40)


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "clear"]), _KEYS), max_size=20))
def test_it_holds_what_a_set_would(changes: list[tuple[str, list[bytes]]]) -> None:
    keys, plain = KeySet(), set[bytes]()
    for what, changed in changes:
        if what == "add":
            assert keys.add_all(changed) == len(set(changed) - plain)
            plain |= set(changed)
        elif what == "remove":
            assert keys.remove_all(changed) == len(set(changed) & plain)
            plain -= set(changed)
        else:
            assert keys.clear() == len(plain)
            plain.clear()
        assert len(keys) == len(plain)
        assert set(keys) == plain
        assert all((key in keys) == (key in plain) for key in changed)
