"""Compiled code reads token ids exactly as simdjson does, or leaves them to it."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.spec.wire import TokenIds
from router.preprocess.id_reader import compiled_reader, read_ids, read_with_simdjson

SEPARATORS = [",", ", ", " ,\r\n\t"]
IDS = st.lists(st.integers(0, 7).flatmap(lambda digits: st.integers(0, 10**digits - 1)), min_size=1, max_size=40)
SCRAPS = st.sampled_from(
    [b"", b",", b",,", b"0", b"00", b"-", b" ", b"\n", b"\0", b"\xff", b"/", b":", b".", b"e", b'"']
)


def read_compiled(body: bytes, begin: int, end: int) -> list[int] | None:
    reader = compiled_reader()
    assert reader is not None, "this test needs a compiler"
    ids = np.full((end - begin) // 2 + 1, -7, "<i4")
    num_ids = reader(body, begin, end, ids.ctypes.data)
    assert ids[-1] == -7, "more was written than there is space for"
    return None if num_ids < 0 else ids[:num_ids].tolist()


@pytest.mark.native
@given(ids=IDS, separator=st.sampled_from(SEPARATORS), before=st.binary(max_size=9), after=st.binary(max_size=9))
@settings(deadline=None)
def test_compiled_code_reads_ids(ids: list[int], separator: str, before: bytes, after: bytes) -> None:
    array = json.dumps(ids, separators=(separator, ":")).encode()
    assert read_compiled(before + array + after, len(before), len(before) + len(array)) == ids


@pytest.mark.native
@given(
    ids=st.lists(st.integers(0, 2**31), max_size=9) | IDS,
    separator=st.sampled_from(SEPARATORS),
    scraps=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 1), SCRAPS), max_size=2),
)
@settings(deadline=None, max_examples=1000)
def test_it_accepts_only_what_simdjson_accepts(
    ids: list[int], separator: str, scraps: list[tuple[int, int, bytes]]
) -> None:
    inner = json.dumps(ids, separators=(separator, ":")).encode()[1:-1]
    for place, num_lost, scrap in scraps:
        at = place % (len(inner) + 1)
        inner = inner[:at] + scrap + inner[at + num_lost :]
    array = b"[%b]" % inner
    expected, found = read_with_simdjson(array), read_compiled(array, 0, len(array))
    assert found is None or TokenIds.of(found) == expected
    assert read_ids(array, 0, len(array)) == expected


@pytest.mark.parametrize(
    "array", [b"", b"[", b"]", b"[]", b"[ ]", b"[1", b"1]", b"[,]", b"[1,]", b"[,1]", b"[01]", b"[1 2]"]
)
def test_what_is_no_array_of_ids_is_refused(array: bytes) -> None:
    assert read_ids(array, 0, len(array)) is None


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PATH", "/nowhere")
    compiled_reader.cache_clear()
    yield
    compiled_reader.cache_clear()


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert read_ids(b"x[1, 20, 300]", 1, 13) == TokenIds.of([1, 20, 300])
    assert "read by simdjson, in twice the time: no C++ compiler" in caplog.text


@pytest.mark.native
def test_compiled_code_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled_reader() is not None
    monkeypatch.setattr("router.preprocess.id_reader.read_with_simdjson", None)
    assert read_ids(b"[1, 20, 300]", 0, 12) == TokenIds.of([1, 20, 300])
