"""Groups of layers that leave early: few, and none too small to be worth it."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.kv import PoolLayout
from tests.fakes.kv import kv_layout
from transfer.plan import LEAST_SPAN_BYTES, MOST_GROUPS, early_ends


def layout_of(num_layers: int, head_dim: int) -> PoolLayout:
    return kv_layout(
        num_pages=1,
        first_head=0,
        num_heads=1,
        first_layer=3,
        num_layers=num_layers,
        page_size=64,
        head_dim=head_dim,
        itemsize=2,
    )


@given(st.integers(1, 100), st.sampled_from([8, 64, 96, 128, 256, 1024]))
def test_groups_are_few_and_none_is_small(num_layers: int, head_dim: int) -> None:
    layout = layout_of(num_layers, head_dim)
    borders = [0, *early_ends(layout), num_layers]
    sizes = [end - start for start, end in pairwise(borders)]
    assert len(sizes) <= MOST_GROUPS
    assert len(sizes) == 1 or min(sizes) * layout.groups[0].layer_bytes >= LEAST_SPAN_BYTES
    least = -(-LEAST_SPAN_BYTES // layout.groups[0].layer_bytes)
    assert len(sizes) > 1 or num_layers < 2 * least, "there would be two groups"


def test_a_model_of_usual_size_leaves_in_quarters() -> None:
    assert early_ends(layout_of(36, 128)) == [9, 18, 27]
