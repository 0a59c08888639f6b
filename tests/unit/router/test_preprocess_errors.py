"""Errors of bodies whose preprocessing process has ended."""

import signal

import pytest

from router.preprocess.process import error_of


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (-signal.SIGPROF, 400, "the body takes more than 10 s of processor time"),
        (-signal.SIGABRT, 400, "the body takes more than 4 GiB of memory"),
        (-signal.SIGKILL, 503, "the process that read this request was killed; try again"),
        (1, 500, "internal error"),
    ],
)
def test_the_exit_status_of_a_process_says_what_was_wrong(status: int, code: int, words: str) -> None:
    error = error_of(status)
    assert (error.status, str(error)[: len(words)]) == (code, words)
