"""What router processes share: a page reads as somebody wrote it whole, or not at all."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.launch.router_board import RouterBoard
from router.board import Board


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    descriptor = os.memfd_create("board")
    yield f"/proc/{os.getpid()}/fd/{descriptor}"
    os.close(descriptor)


def test_before_anything_is_written_nothing_is_read(path: str) -> None:
    assert Board(path, 4).read(3) is None


@given(contents=st.lists(st.tuples(st.integers(0, 2), st.binary(min_size=1, max_size=200))))
def test_others_read_what_was_written_last(path: str, contents: list[tuple[int, bytes]]) -> None:
    ours, theirs = Board(path, 3), Board(path, 3)
    for page, content in contents:
        before = theirs.number(page)
        ours.write(page, content)
        assert theirs.read(page) == content
        assert theirs.number(page) != before
    assert [theirs.read(page) for page, _ in contents] == [dict(contents)[page] for page, _ in contents]


def test_a_page_whose_writer_died_is_not_read_until_it_is_written_anew(path: str) -> None:
    board = Board(path, 1)
    board.write(0, b"whole")
    number = board.number(0)
    board._memory[0:8] = (number + 1).to_bytes(8, "little")
    assert board.read(0) is None
    board.write(0, b"again")
    assert board.read(0) == b"again"


def test_a_changed_byte_is_no_content(path: str) -> None:
    board = Board(path, 1)
    board.write(0, b"content")
    board._memory[16] ^= 1
    assert board.read(0) is None


def test_the_driver_sees_that_a_process_writes() -> None:
    shared = RouterBoard(2)
    first, second = (Board(place.board, 4) for place in shared.places)
    second.write(1, b"anything")
    before = shared.beats()
    first.write(0, b"anything")
    after = shared.beats()
    assert before["router-1"] == after["router-1"] != 0
    assert before["router"] != after["router"]
    assert RouterBoard(1).beats() == {}


def test_the_flag_is_everybodys(path: str) -> None:
    ours, theirs = Board(path, 2), Board(path, 2)
    for value in (True, False):
        ours.flag = value
        assert theirs.flag is value


def test_numbers_begin_anew(path: str) -> None:
    board = Board(path, 1)
    board._memory[0:8] = b"\xff" * 8
    board.write(0, b"after")
    assert board.read(0) == b"after"
