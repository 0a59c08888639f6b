"""The metrics of replicas, from what their leaders' heartbeats say."""

import msgspec

from cluster.spec.ids import Incarnation
from cluster.spec.lifecycle import Role
from cluster.spec.registry import ComputeTimes, ReplicaEntry, ReplicaLoad, TableSnapshot
from router.replica_metrics import replica_metrics
from tests.fakes.paged_ranks import row


def samples(load: ReplicaLoad, family: str) -> list[tuple[dict[str, str], float]]:
    """Labels and values of one family, where a prefill replica of one rank tells of this load."""
    load = msgspec.json.decode(msgspec.json.encode(load), type=ReplicaLoad)
    first = row(Role.PREFILL, 0, 1, num_pages=1)
    entry = ReplicaEntry(
        replica=first.replica, role=Role.PREFILL, incarnation=Incarnation(1), ready=True, rows=(first,), load=load
    )
    families = {made.name: made for made in replica_metrics(TableSnapshot(version=1, replicas=(entry,), reaped={}))}
    return [(sample.labels, sample.value) for sample in families[family].samples]


def test_each_expert_has_its_line() -> None:
    assert samples(ReplicaLoad(expert_tokens={1: 7, 0: 5}), "baton_expert_tokens") == [
        ({"replica": "prefill-0", "expert": "0"}, 5),
        ({"replica": "prefill-0", "expert": "1"}, 7),
    ]


def test_preemptions_are_counted() -> None:
    assert samples(ReplicaLoad(num_preempted=5), "baton_num_preemptions") == [({"replica": "prefill-0"}, 5)]


def test_each_rank_has_its_steps() -> None:
    load = ReplicaLoad(computed=(ComputeTimes(global_rank=1, num_steps=3, total_s=0.5),))
    assert samples(load, "baton_rank_steps") == [({"replica": "prefill-0", "rank": "1"}, 3)]
    assert samples(load, "baton_rank_step_seconds") == [({"replica": "prefill-0", "rank": "1"}, 0.5)]


def test_pages_and_their_type_are_told() -> None:
    ((labels, value),) = samples(ReplicaLoad(total_pages=9), "baton_cache_config_info")
    assert (labels["replica"], labels["num_gpu_blocks"], value) == ("prefill-0", "9", 1)
    assert labels.keys() == {"replica", "block_size", "num_gpu_blocks", "cache_dtype"}


def test_graphs_are_told_with_their_memory() -> None:
    load = ReplicaLoad(graph_steps={"replayed": 3}, graph_bytes=5)
    assert samples(load, "baton_decode_graph_steps") == [({"replica": "prefill-0", "way": "replayed"}, 3)]
    assert samples(load, "baton_decode_graph_bytes") == [({"replica": "prefill-0"}, 5)]
    assert samples(ReplicaLoad(), "baton_decode_graph_bytes") == []
