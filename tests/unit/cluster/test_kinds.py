"""What the actors ask of the Hugging Face hub."""

import huggingface_hub
import pytest

from cluster.launch.kinds import RouterActor
from cluster.spec.config import DeployConfig
from cluster.spec.errors import UserError
from cluster.spec.ids import Incarnation
from cluster.spec.worker_spec import Rendezvous, RouterShare

MEETING = Rendezvous(bootstrap_url="http://127.0.0.1:1", token="token", channel_key=None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Patterns of the files asked for; none is there."""
    patterns: list[str] = []

    def download(repository: str, *, allow_patterns: list[str]) -> str:
        patterns.extend(allow_patterns)
        raise OSError(f"no {repository}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("cluster.logs.set_up_logs", lambda *_: None)
    return patterns


def test_the_router_fetches_no_weights(asked: list[str]) -> None:
    with pytest.raises(UserError, match="no owner/name"):
        RouterActor({}, Incarnation(1), RouterShare()).start(DeployConfig(), "owner/name", MEETING, "127.0.0.1")
    assert "*.json" in asked
    assert not any("safetensors" in pattern for pattern in asked)
