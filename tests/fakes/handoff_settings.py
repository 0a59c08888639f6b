"""What the leaders of a handoff between fakes are told of themselves."""

from cluster.spec.peer import Peer
from cluster.spec.registry import RankRow, Verify
from tests.fakes.paged_ranks import GEOMETRY
from workers.scheduler.decode_request import DecodeSettings
from workers.scheduler.prefill_request import PrefillSettings


def prefill_settings(rows: list[RankRow]) -> PrefillSettings:
    """Of the leader of these ranks."""
    first = rows[0]
    return PrefillSettings(
        me=Peer(replica=first.replica, incarnation=first.incarnation, address=first.address),
        row=first,
        rank_addresses=tuple(rank_row.address for rank_row in rows),
        settle_s=0.5,
    )


def decode_settings(row: RankRow, verify: Verify) -> DecodeSettings:
    """Of the leader of this rank."""
    return DecodeSettings(
        me=Peer(replica=row.replica, incarnation=row.incarnation, address=row.address),
        geometry=GEOMETRY,
        layout=row.layout,
        page_bytes=row.layout.page_bytes,
        transfer_timeout_s=60.0,
        rank_addresses=(row.address,),
        verify=verify,
        settle_s=0.5,
    )
