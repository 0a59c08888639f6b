"""Page keys are made as far as anybody knows them, and then no policy can tell."""

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.page_key import page_keys
from router.page_index import PromptKeys

_PAGE_SIZE = 2


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(0, 40), st.integers(0, 40))
def test_what_is_known_is_there_up_to_the_first_that_is_not(prompt: list[int], first: int, second: int) -> None:
    whole = page_keys(prompt[:-1], _PAGE_SIZE, "salt")
    keys = PromptKeys(prompt, _PAGE_SIZE, "salt")
    for num_known in (first, second):
        made = keys.known(whole[:num_known].__contains__)
        assert [*made] == whole[: len(made)]
        assert len(made) > num_known or len(made) == len(whole)


def test_one_that_nobody_knows_costs_little_however_long_it_is() -> None:
    assert len(PromptKeys([1] * 20_000, _PAGE_SIZE, "").known(lambda _: False)) < 10


def test_a_very_long_prompt_is_prepared_whole() -> None:
    prompt: Sequence[int] = [1] * 40_000
    keys = PromptKeys(prompt, _PAGE_SIZE, "")
    asyncio.run(keys.prepare())
    assert [*keys.known(lambda _: False)] == page_keys(prompt[:-1], _PAGE_SIZE)
