"""A table that grows in place is the list of everything that was added."""

from hypothesis import given
from hypothesis import strategies as st

from workers.engine.step_state import PageTable


@given(st.lists(st.lists(st.integers(0, 2**40), min_size=1, max_size=40), max_size=6))
def test_it_grows_and_what_was_seen_of_it_stays(parts: list[list[int]]) -> None:
    table, seen, added = PageTable(), [], list[int]()
    for part in parts:
        table.extend(part, 7)
        added += part
        seen.append((table.all, list(added)))
    assert all(view.tolist() == wanted for view, wanted in seen)
