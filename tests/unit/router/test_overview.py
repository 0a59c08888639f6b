"""Entries of requests on the status page."""

from router.answer import Answer
from router.overview import Overview
from tests.fakes.dispatching import ask


def test_an_entry_names_the_request_and_its_key_while_it_is_open_and_afterwards() -> None:
    request, overview = ask(), Overview()
    request.request_id, request.tenant = "abc", "a"
    with overview.show([request]):
        (shown,) = overview.open_entries(now_s=1.0)
    overview.recent.appendleft(Answer([request], lambda _: None, lambda _: None).summary("finished", ended_s=2.0))
    (summary,) = overview.recent
    for entry in (shown, summary.entry()):
        assert (entry["id"], entry["key"]) == ("abc", "a")
    assert overview.num_open == 0
