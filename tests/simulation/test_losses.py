"""Loss of single messages between healthy replicas, with the timeouts of a real cluster."""

from dataclasses import replace

import pytest

from cluster.simulator.environment import Network
from cluster.simulator.scenario import ClientRequest, Hazards, Scenario, Shape
from cluster.simulator.simulation import Outcome, Simulation
from cluster.spec.config import TransferConfig
from cluster.spec.messages import Message
from cluster.spec.registry import Verify
from cluster.spec.router_config import RouterConfig

TRANSFER_TIMEOUT_S = TransferConfig().transfer_timeout_s
SHAPE = Shape(
    num_prefill=2,
    num_decode=2,
    cp=2,
    verify=Verify.DIGEST,
    transfer_timeout_s=TRANSFER_TIMEOUT_S,
    request_timeout_s=RouterConfig().request_timeout_s,
)
CALM = Hazards()
REQUEST = ClientRequest(at_s=1.0, prompt=bytes(range(20)), max_tokens=6)
ASKS = (REQUEST, replace(REQUEST, is_choice=True), replace(REQUEST, at_s=2.0))


class Losing:
    """Network that loses the first messages with the given names, one per listed name."""

    def __init__(self, patch: pytest.MonkeyPatch, *lost: str) -> None:
        self.left = list(lost)
        """Names in the form ``kind`` or ``kind>role``."""
        real = Network.send

        def send(network: Network, sender: str, address: str, message: Message) -> None:
            kind = type(message).__name__
            if getattr(message, "finish", None) is not None:
                kind = "LastOutput"
            role = address.partition("/")[2].partition("-")[0].partition(".")[0]
            for name in (kind, f"{kind}>{role}"):
                if name in self.left:
                    self.left.remove(name)
                    return
            real(network, sender, address, message)

        patch.setattr(Network, "send", send)
        # An attempt may fail, but not a request.
        patch.setattr(Scenario, "is_calm", False)


def run(*requests: ClientRequest, shape: Shape = SHAPE, hazards: Hazards = CALM) -> Outcome:
    return Simulation(Scenario(seed=1, shape=shape, requests=requests, hazards=hazards)).run()


@pytest.mark.parametrize(
    "lost",
    [
        ["Submit>prefill"],
        ["Submit>decode"],
        ["Submit>decode", "Submit>prefill"],
        ["Submit>decode", "Inquire"],
        ["Submit>decode", "Failure"],
        ["Submit>decode", "Cancel>prefill"],
        ["Ticket"],
        ["Result"],
        ["Done"],
        ["Result", "Done", "Done"],
        ["Done", "Revoke"],
        ["Done", "Drained"],
        ["Submit>prefill", "Refused"],
        ["CheckPages"],
        ["PagesChecked", "CheckPages"],
        ["Submit>prefill", "Failure"],
        ["Output"],
        ["Output", "Output"],
        ["LastOutput"],
        ["LastOutput", "LastOutput", "LastOutput"],
        ["LastOutput", "Inquire"],
        ["LastOutput", "Failure"],
    ],
    ids="+".join,
)
def test_every_request_is_answered_without_leftovers(lost: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    losing = Losing(monkeypatch, *lost)
    outcome = run(*ASKS)
    assert losing.left == []
    assert outcome.violation is None
    assert outcome.ends == {"finished": len(ASKS)}
    assert outcome.virtual_s < 1.5 * TRANSFER_TIMEOUT_S


@pytest.mark.parametrize("patience_s", [0.001, 5.0])
@pytest.mark.parametrize("lost", [["Cancel>prefill"], ["Cancel>decode"], ["Cancel>prefill", "Cancel>decode"]])
def test_abandoned_requests_run_for_some_seconds_at_most(
    lost: list[str], patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing = Losing(monkeypatch, *lost)
    shape = replace(SHAPE, decode_pages=300)
    request = replace(REQUEST, max_tokens=1000, patience_s=patience_s)
    outcome = run(request, shape=shape, hazards=Hazards(slowness=30.0))
    assert losing.left == []
    assert outcome.violation is None
    assert outcome.ends == {"left": 1}
    assert outcome.virtual_s < 30.0
