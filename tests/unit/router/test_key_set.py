"""A key set holds what a plain set would."""

from hypothesis import given
from hypothesis import strategies as st

from router.page_index import KeySet

_KEYS = st.lists(st.binary(min_size=2, max_size=2), max_size=40)


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), _KEYS), max_size=20))
def test_it_holds_what_a_set_would(changes: list[tuple[str, list[bytes]]]) -> None:
    keys, plain = KeySet(), set[bytes]()
    for what, changed in changes:
        if what == "add":
            keys.add_all(changed)
            plain |= set(changed)
        else:
            keys.remove_all(changed)
            plain -= set(changed)
        assert len(keys) == len(plain)
        assert set(keys) == plain
        assert all((key in keys) == (key in plain) for key in changed)
