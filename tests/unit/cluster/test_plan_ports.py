"""Ports in a deployment plan."""

import pytest

from tests.unit.cluster.test_plan import plan_of


def test_ports_are_listed_with_their_count() -> None:
    ports = plan_of("prefill: {replicas: 2, parallel: {cp: 2}}\nrouter: {port: 9000}").ports
    assert [(port.process, port.purpose, port.port, port.count) for port in ports] == [
        ("router", "HTTP for clients", 9000, 1),
        ("bootstrap", "HTTP rank table", None, 1),
        ("router", "channel", None, 1),
        ("router", "commands from the driver", None, 1),
        ("worker", "channel", None, 5),
        ("replica", "rendezvous store of the ranks", None, 3),
    ]


@pytest.mark.parametrize(
    ("text", "purpose", "count"),
    [
        ("router: {processes: 3}", "channel", 3),
        ("router: {processes: 3}", "commands from the driver", 3),
        ("router: {processes: 3}", "HTTP for clients", 1),
        ("transfer: {backend: mooncake}\nprefill: {parallel: {cp: 2}}", "handshake of Mooncake's engines", 3),
        ("transfer: {backend: mooncake}\nprefill: {parallel: {cp: 2}}", "KV by Mooncake over TCP", 3),
        ("transfer: {backend: mooncake}\nprefill: {parallel: {cp: 2}}", "process groups over TCP (gloo)", 2),
        ("resources: {collectives: tcp}\nprefill: {replicas: 2, parallel: {cp: 2, pp: 2}}", "gloo", 2 * (4 + 4)),
        ("resources: {collectives: tcp}\nprefill: {parallel: {cp: 2}, shard_linear: gather}", "gloo", 2 + 2),
        (
            "resources: {device: cuda, gpus_per_worker: 0.5}\ntransfer: {backend: mooncake}\n"
            "prefill: {parallel: {cp: 2}}",
            "gloo",
            2,
        ),
        # The model has one KV head, which both ranks hold.
        ("resources: {collectives: tcp}\ndecode: {parallel: {tp: 2}}", "gloo", 2 + 2),
    ],
)
def test_every_process_and_every_group_has_its_ports(text: str, purpose: str, count: int) -> None:
    found = [port for port in plan_of(text).ports if purpose in port.purpose and port.process in ("router", "worker")]
    assert found[0].count == count


def test_ports_of_expert_groups_and_unused_ones() -> None:
    experts = "model: {path: recall-moe}\nresources: {collectives: tcp}\nprefill: {parallel: {cp: 2, ep: 2}}"
    assert [port.count for port in plan_of(experts).ports if "gloo" in port.purpose] == [2 + 2 + 2]
    assert all("gloo" not in port.purpose and "Mooncake" not in port.purpose for port in plan_of("{}").ports)
