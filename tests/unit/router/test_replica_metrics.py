"""The metrics of replicas, from what their leaders' heartbeats say."""

import msgspec

from cluster.spec.ids import Incarnation
from cluster.spec.lifecycle import Role
from cluster.spec.registry import ReplicaEntry, ReplicaLoad, TableSnapshot
from router.replica_metrics import replica_metrics
from tests.fakes.paged_ranks import row


def test_each_expert_has_its_line() -> None:
    load = ReplicaLoad(expert_tokens={1: 7, 0: 5})
    load = msgspec.json.decode(msgspec.json.encode(load), type=ReplicaLoad)
    first = row(Role.PREFILL, 0, 1, num_pages=1)
    entry = ReplicaEntry(
        replica=first.replica, role=Role.PREFILL, incarnation=Incarnation(1), ready=True, rows=(first,), load=load
    )
    families = {
        family.name: family for family in replica_metrics(TableSnapshot(version=1, replicas=(entry,), reaped={}))
    }
    samples = [(sample.labels, sample.value) for sample in families["baton_expert_tokens"].samples]
    assert samples == [
        ({"replica": "prefill-0", "expert": "0"}, 5),
        ({"replica": "prefill-0", "expert": "1"}, 7),
    ]
