"""``baton bench serve`` before a router over real sockets."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from cluster.cli.bench import bench
from tests.fakes.router_cluster import RouterCluster
from tests.fakes.trace_events import check_trace

pytestmark = pytest.mark.integration


def test_the_timeline_of_a_run_is_written(shared: RouterCluster, tmp_path: Path) -> None:
    out = tmp_path / "timeline.json"
    result = _bench(shared, "--vocab-size", "258", "--trace-out", str(out))
    assert result.exit_code == 0, result.stderr
    check_trace(json.loads(out.read_text()))


@pytest.mark.parametrize("warmup", ["0", "1"])
def test_a_model_with_fewer_tokens_than_are_drawn_from(shared: RouterCluster, warmup: str) -> None:
    result = _bench(shared, "--warmup", warmup)
    assert result.exit_code == 1
    (line,) = result.stderr.strip().splitlines()
    assert "allowed: 0 to 257; the model's vocabulary is smaller than --vocab-size says" in line


def _bench(cluster: RouterCluster, *arguments: str) -> Result:
    app = typer.Typer()
    app.add_typer(bench, name="bench")
    lengths = ("--num-requests", "1", "--input-len", "8", "--output-len", "3")
    return CliRunner().invoke(app, ["bench", "serve", "--url", cluster.url, *lengths, *arguments])
