"""The page at ``/`` in a real browser, with several replicas and ranks, and cross-origin pages."""

import html
import itertools
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from cluster.spec.registry import AxisSizes, RankCoords, ReplicaEntry, ReplicaLoad, SendTimes
from tests.fakes.bootstrap import entry_of, table_of
from tests.fakes.router_cluster import RouterCluster, run_cluster

pytestmark = [pytest.mark.integration, pytest.mark.chromium]

_ASKING = """<p>waits</p><script>
const asked = {model: "echo", prompt: "abc", max_tokens: 3}
const headers = {"content-type": "application/json", authorization: "Bearer any", "x-request-id": "own-id"}
fetch("%s/v1/completions", {method: "POST", headers, body: JSON.stringify(asked)})
  .then(async reply => [reply.status, reply.headers.get("x-request-id"), reply.headers.get("x-baton-prefill"),
    (await reply.json()).choices[0].text].join(" "), error => error.name)
  .then(shown => { document.querySelector("p").textContent = shown })
</script>"""

_PHONE_WIDTH = 390
_FRAMED = """<iframe style="width: %dpx; height: 5000px; border: 0" srcdoc="%s"></iframe><p>waits</p><script>
document.querySelector("iframe").addEventListener("load", event => {
  document.querySelector("p").textContent = event.target.contentDocument.documentElement.scrollWidth
})
</script>"""


def wide(entry: ReplicaEntry, cp: int, tp: int) -> ReplicaEntry:
    """Return the replica with more ranks."""
    (record,) = entry.ranks
    sizes = AxisSizes(dp=1, cp=cp, tp=tp, pp=1)
    records = tuple(
        msgspec.structs.replace(
            record,
            sizes=sizes,
            global_rank=rank,
            coords=RankCoords(dp=0, cp=rank // tp, tp=rank % tp, pp=0),
            device="GPU 3, H200",
        )
        for rank in range(cp * tp)
    )
    sends = tuple(SendTimes(global_rank=rank, num_bytes=3 << 20, num_transfers=1) for rank in range(cp * tp))
    load = ReplicaLoad(total_pages=100, free_pages=60, cached_pages=25, num_running=2, num_waiting=1, sends=sends)
    return msgspec.structs.replace(entry, ranks=records, load=load)


def browse(url: str, *options: str) -> str:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--virtual-time-budget=4000", *options, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_it_shows_the_cluster(cluster: RouterCluster, tmp_path: Path) -> None:
    prefill, decode = wide(entry_of(cluster.prefill.peer), 2, 2), wide(entry_of(cluster.decode.peer), 1, 2)
    cluster.table.show(table_of(prefill, decode, version=2))
    cluster.complete("abc", max_tokens=9)
    cluster.complete("abcdef", max_tokens=100)
    page = browse(f"{cluster.url}/", f"--user-data-dir={tmp_path}", "--dump-dom")
    for text in (
        "echo",
        "prefill-0",
        "decode-0",
        "2 running, 1 waiting",
        "40 of 100 pages held, 25 cached",
        "MiB sent",
        "sends to decode-0 (2)",
        "GPU 3, H200",
        'id="login" hidden=""',
    ):
        assert text in page
    assert [
        page.count(f'<span class="name">{axis} {index}</span>') for axis, index in (("cp", 0), ("cp", 1), ("tp", 1))
    ] == [
        1,
        1,
        3,
    ]
    assert page.count('class="rank"') == 6
    (requests,) = re.findall(r'<tbody id="requests">(.*?)</tbody>', page, re.DOTALL)
    assert requests.count("<tr") == 2
    assert requests.count("var(--prefill)") == 2
    assert "prefill 0 ms · prefill-0" in requests
    assert re.search(r'<span id="problem" role="status"></span>', page)
    assert re.search(r'<span id="longest">\d+ ms</span>', page)


def test_it_fits_a_phone(cluster: RouterCluster, tmp_path: Path) -> None:
    prefill, decode = wide(entry_of(cluster.prefill.peer), 2, 2), wide(entry_of(cluster.decode.peer), 1, 2)
    cluster.table.show(table_of(prefill, decode, version=2))
    cluster.complete("abc", max_tokens=9)
    shown = browse(f"{cluster.url}/", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom")
    shown = shown.replace('<h1 id="cluster">', f'<h1 id="cluster">{"n" * 63}')  # the longest name
    static = html.escape(re.sub("<script>.*?</script>", "", shown, flags=re.DOTALL))
    outer = tmp_path / "outer.html"
    outer.write_text(_FRAMED % (_PHONE_WIDTH, static))
    measured = browse(outer.as_uri(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom")
    assert re.findall("<p>(.*?)</p>", measured)[-1] == str(_PHONE_WIDTH)


def test_it_shows_latencies_of_the_last_minute(cluster: RouterCluster, tmp_path: Path) -> None:
    cluster.decode.token_s = 0.01
    with ThreadPoolExecutor() as pool:
        shown = pool.submit(browse, f"{cluster.url}/", f"--user-data-dir={tmp_path}", "--dump-dom")
        while not shown.done():
            cluster.complete("abc", max_tokens=30)
    for latency in ("TTFT", "ITL"):
        assert re.search(rf"<b>[\d.]+ m?s · [\d.]+ m?s</b><span [^>]*>{latency}, p50 and p99</span>", shown.result())


def test_kv_of_replicas_that_restart_shows_no_negative_rate(cluster: RouterCluster, tmp_path: Path) -> None:
    prefill, decode = wide(entry_of(cluster.prefill.peer), 2, 2), entry_of(cluster.decode.peer)
    with ThreadPoolExecutor() as pool:
        shown = pool.submit(browse, f"{cluster.url}/", f"--user-data-dir={tmp_path}", "--dump-dom")
        for version in itertools.count(2):
            sends = (SendTimes(global_rank=0, num_bytes=(1 << 40) // version, num_transfers=1),)
            less = msgspec.structs.replace(prefill, load=msgspec.structs.replace(prefill.load, sends=sends))
            cluster.table.show(table_of(less, decode, version=version))
            if shown.done():
                break
            time.sleep(0.01)
    assert re.search(r"<b>0</b><span [^>]*>KV MiB / s</span>", shown.result())


def test_it_asks_for_a_key_in_a_form(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: a, key: a-secret-of-a}\n")
    for cluster in run_cluster(folder, api_keys_file=str(keys)):
        page = browse(f"{cluster.url}/", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom")
        assert 'id="login">' in page
        assert 'id="content" hidden=""' in page
        assert cluster.metric('baton_request_refused_total{status="401"}') == 1, "it asks again without a key"


def test_a_page_from_elsewhere_uses_the_endpoint(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for origins in ((), ("*",)):
        for cluster in run_cluster(folder, allowed_origins=origins):
            page.write_text(_ASKING % cluster.url)
            shown = browse(page.as_uri(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom")
            assert re.findall("<p>(.*)</p>", shown) == ["200 own-id prefill-0 abc" if origins else "TypeError"]
