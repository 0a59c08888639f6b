"""Pages from one memory to places in another: each where it belongs, no other touched."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.page_copies import check_copies


@given(st.data())
def test_pages_are_where_they_belong(data: st.DataObject) -> None:
    check_copies(data, torch.device("cpu"))
