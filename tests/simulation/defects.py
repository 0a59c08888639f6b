"""Plausible mistakes that a test can plant in the product."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from cluster.bootstrap.table import WatchedTable
from cluster.launch.services import BOOTSTRAP
from cluster.launch.waits import DrainWatch
from cluster.simulator.rank_process import Follower
from cluster.simulator.replica import Replica
from cluster.spec.ids import ROUTER, Incarnation, Peer, Room
from cluster.spec.messages import Message, Submit
from cluster.spec.registry import TableSnapshot
from cluster.spec.tiers import TierJobResult
from cluster.spec.transfer_messages import Done, Drained, PageDigests, Revoke, Ticket
from cluster.supervisor import reconcile, silence
from cluster.supervisor.events import Action, End, Ended, Failed, Prove, Started
from cluster.supervisor.operate import Step
from cluster.supervisor.state import Cluster, Now
from transfer.page_assignment import owned_pages
from transfer.page_range import digest_pages
from transfer.receiver import FailureKind, PageChecks, ReceiverSession, ReceiverState
from transfer.sender import SenderSession
from workers.cache.prefix_tree import PrefixTree
from workers.hicache.policy.jobs import TierJobs
from workers.scheduler.decode import DecodeLeader
from workers.scheduler.decode_request import DecodeRequest, receiver_session
from workers.scheduler.leader import DpLeader
from workers.scheduler.prefill import PrefillLeader
from workers.scheduler.prefill_request import PrefillRequest, PrefillState
from workers.scheduler.replica_leader import ReplicaLeader

Patch = pytest.MonkeyPatch


def free_on_timeout(patch: Patch) -> None:
    """Decode frees a ticket's pages when its deadline passes."""
    revoke = ReceiverSession._revoke

    def revoke_and_free(self: ReceiverSession, kind: FailureKind, reason: str, now_s: float) -> Revoke | None:
        message = revoke(self, kind, reason, now_s)
        if message is not None and kind is FailureKind.TIMED_OUT:
            self._move(ReceiverState.RELEASED, "time-out")
        return message

    patch.setattr(ReceiverSession, "_revoke", revoke_and_free)


def count_the_same_sender_twice(patch: Patch) -> None:

    def on_done(self: ReceiverSession, message: Done, now_s: float) -> Revoke | None:
        self._dones[len(self._dones)] = message
        return self._check_complete(now_s)

    patch.setattr(ReceiverSession, "_on_done", on_done)


def ignore_the_incarnation(patch: Patch) -> None:
    """The end of a peer's earlier start counts as the end of the running one."""
    patch.setattr(TableSnapshot, "is_reaped", lambda self, peer: peer.replica in self.reaped)


def drop_the_drain_ack(patch: Patch) -> None:
    send = DpLeader.send

    def send_all_but_one(self: DpLeader, address: str, message: Message) -> None:
        if not isinstance(message, Drained):
            send(self, address, message)

    patch.setattr(DpLeader, "send", send_all_but_one)


def miscount_pages(patch: Patch) -> None:
    """A sender reports one page less than it has sent."""
    done = SenderSession.done

    def done_with_less(self: SenderSession) -> Done | None:
        message = done(self)
        return message and replace(message, num_pages=message.num_pages - 1)

    patch.setattr(SenderSession, "done", done_with_less)


def end_before_it_is_drained(patch: Patch) -> None:
    """A replica that an operator removes ends as soon as it begins to drain."""
    patch.setattr(DrainWatch, "is_over", lambda _self, _now_s: True)


def restart_one_rank_alone(patch: Patch) -> None:
    """The replica replaces a dead follower and continues."""
    kill_rank = Replica.kill_rank

    def replace_rank(self: Replica, rank: int) -> None:
        number, leader = rank % len(self.ranks), self.leader
        if number == 0:
            kill_rank(self, rank)
            return
        old = self.ranks[number]
        old.kill()
        new = Follower(leader.env, leader.records, number, old.memory.allocator)
        self.ranks[number] = new
        for other in self.ranks:
            other.shard[:] = [new if it is old else it for it in other.shard]
        new.shard += old.shard
        new.num_begun = new.num_computed = old.num_computed

    patch.setattr(Replica, "kill_rank", replace_rank)


def restart_next_to_remaining_ranks(patch: Patch) -> None:
    """The supervisor restarts a replica that has lost a rank without ending the other ranks."""
    on_failed = reconcile._on_failed

    def fail(cluster: Cluster, event: Failed, now: Now) -> Step:
        after, actions = on_failed(cluster, event, now)
        if event.name in (BOOTSTRAP, ROUTER) or not any(isinstance(action, End) for action in actions):
            return after, actions
        return reconcile._on_ended(after, Ended(event.name, event.incarnation, True), now)

    patch.setattr(reconcile, "_on_failed", fail)


def _change_message(patch: Patch, owner: type, method: str, fields: Callable[[Any], dict[str, Any]]) -> None:
    """Make a method handle messages with these fields replaced."""
    real = getattr(owner, method)
    patch.setattr(owner, method, lambda self, message: real(self, replace(message, **fields(self))))


def accept_messages_to_an_earlier_start(patch: Patch) -> None:
    """Decode accepts prefill's messages for its own earlier start."""
    _change_message(
        patch, ReceiverSession, "_is_foreign", lambda it: {"decode_incarnation": it.ticket.decode.incarnation}
    )


def accept_messages_from_an_earlier_start(patch: Patch) -> None:
    """Decode accepts messages from an earlier start of prefill."""
    _change_message(patch, ReceiverSession, "_is_foreign", lambda it: {"prefill": it.prefill})


def accept_any_submit(patch: Patch) -> None:
    """Prefill accepts requests for an earlier start."""
    _change_message(patch, PrefillLeader, "_on_submit", lambda it: {"prefill": it.me})


def take_any_ticket(patch: Patch) -> None:
    _change_message(patch, PrefillLeader, "_on_ticket", lambda it: {"prefill_incarnation": it.me.incarnation})


def decode_any_submit(patch: Patch) -> None:
    _change_message(patch, DecodeLeader, "_on_submit", lambda it: {"decode": it.me})


def skip_a_page(patch: Patch) -> None:
    """A sender skips its last page but reports the full number of pages."""
    patch.setattr("workers.handoff.kv_sender.owned_pages", lambda *given, **named: owned_pages(*given, **named)[:-1])


def skip_a_page_and_ignore_counts(patch: Patch) -> None:
    """Decode also ignores the number of pages."""
    skip_a_page(patch)
    patch.setattr(ReceiverSession, "_mismatch", lambda _self, _result: None)


def start_before_pages_are_checked(patch: Patch) -> None:
    patch.setattr(DecodeLeader, "_verify", DecodeLeader._begin_decoding)


def ignore_page_checks(patch: Patch) -> None:
    """Decode ignores the results of the page checks."""
    take = PageChecks.take
    patch.setattr(PageChecks, "take", lambda self, checked: take(self, checked) and 0)


def skip_a_digest(patch: Patch) -> None:
    """A sender reports no digest for the last page of a job."""

    def digest_all_but_one(*given: Any) -> PageDigests:
        report = digest_pages(*given)
        return replace(report, pages=report.pages[:-1], digests=report.digests[:-1])

    patch.setattr("workers.handoff.kv_sender.digest_pages", digest_all_but_one)


def skip_a_digest_and_ignore_it(patch: Patch) -> None:
    """Decode also ignores missing digests."""
    skip_a_digest(patch)
    patch.setattr(ReceiverSession, "_digest_problem", lambda _self, _num_bytes: None)


def route_rooms_by_number(patch: Patch) -> None:
    """Messages about a room go to the DP rank with its number instead of the request's DP rank."""
    home = ReplicaLeader._dp_rank_of

    def home_by_number(self: ReplicaLeader, room: Room, message: Message) -> int:
        by_request = home(self, room, message)
        return by_request if isinstance(message, Submit) else room % len(self._leaders)

    patch.setattr(ReplicaLeader, "_dp_rank_of", home_by_number)


def ticket_pages_that_are_computed_into(patch: Patch) -> None:
    """Decode issues tickets for pages to which the current step still writes."""

    def send_at_once(self: DecodeLeader, request: DecodeRequest, prefill: Peer) -> None:
        request.session = receiver_session(self._settings, request, prefill)
        self.send(prefill.address, request.session.open(self._now_s))

    patch.setattr(DecodeLeader, "_send_ticket", send_at_once)


def free_source_pages_early(patch: Patch) -> None:
    """Prefill frees its pages with the Result although its ranks still send them."""

    def end_at_once(self: PrefillLeader, request: PrefillRequest) -> None:
        if request.state in (PrefillState.SENDING, PrefillState.STOPPING):
            self._end(request, "result")

    patch.setattr(PrefillLeader, "_end_if_settled", end_at_once)


def free_pages_without_settling(patch: Patch) -> None:
    """Decode frees pages as soon as their writer is proven gone."""
    prefill_gone = ReceiverSession.prefill_gone

    def gone_at_once(self: ReceiverSession, now_s: float) -> None:
        self._settle_s = 0.0
        prefill_gone(self, now_s)

    patch.setattr(ReceiverSession, "prefill_gone", gone_at_once)


def treat_unreachable_as_gone(patch: Patch) -> None:
    """The supervisor considers processes on an unreachable machine gone."""
    on_ended = reconcile._on_ended

    def end(cluster: Cluster, event: Ended, now: Now) -> Step:
        return on_ended(cluster, dataclasses.replace(event, proven=True), now)

    patch.setattr(reconcile, "_on_ended", end)


def prove_only_starts_known_to_the_driver(patch: Patch) -> None:
    """No proof is required for a start that the driver never saw in the table."""
    on_started, on_ended = reconcile._on_started, reconcile._on_ended
    heard: set[tuple[str, Incarnation]] = set()

    def start(cluster: Cluster, event: Started, now: Now) -> Step:
        heard.add((event.name, event.incarnation))
        return on_started(cluster, event, now)

    def end(cluster: Cluster, event: Ended, now: Now) -> Step:
        after, actions = on_ended(cluster, event, now)
        if (event.name, event.incarnation) in heard:
            return after, actions
        after = dataclasses.replace(after, unproven=cluster.unproven)
        return after, [action for action in actions if not isinstance(action, Prove)]

    patch.setattr(reconcile, "_on_started", start)
    patch.setattr(reconcile, "_on_ended", end)


def judge_leases_by_the_clock(patch: Patch) -> None:
    """The bootstrap service counts the time for which it was stalled itself."""
    patch.setattr(WatchedTable, "now_s", lambda self: self._clock.now_s())


def judge_silence_by_the_clock(patch: Patch) -> None:
    """The supervisor counts the time for which it, or its view of the table, was stalled."""
    examine = silence.examine_overdue

    def examine_at_once(cluster: Cluster, now: Now) -> tuple[Cluster, list[Action]]:
        return examine(dataclasses.replace(cluster, answered_s=now.s), now)

    def answer(cluster: Cluster, now: Now) -> Cluster:
        return dataclasses.replace(cluster, answered_s=now.s)

    patch.setattr(reconcile, "examine_overdue", examine_at_once)
    patch.setattr(reconcile, "on_table_answered", answer)
    patch.setattr(reconcile, "restart_after_suspension", lambda it, now: (dataclasses.replace(it, looked_s=now.s), []))


def repeat_tickets_for_ever(patch: Patch) -> None:
    """Decode waits for a prefill replica that answers others, but not its tickets."""
    send = ReceiverSession._send_ticket

    def send_without_counting(self: ReceiverSession, now_s: float) -> Ticket:
        self._num_unanswered = 0
        return send(self, now_s)

    patch.setattr(ReceiverSession, "_send_ticket", send_without_counting)


def keep_no_tombstones(patch: Patch) -> None:
    patch.setattr("workers.scheduler.leader.Tombstones.add", lambda _self, _room, _reason: None)


def use_a_page_id_as_a_local_index(patch: Patch) -> None:
    """A rank with sharded KV uses the replica's page id as an index into its own pool."""
    patch.setattr("workers.handoff.kv_sender.local_page", lambda record, page: page % record.layout.num_pages)


def end_a_tier_job_with_the_first_result(patch: Patch) -> None:
    """A tier job ends when the first rank has finished its part."""
    make = TierJobs.__init__

    def make_for_one(self: TierJobs, num_ranks: int) -> None:
        del num_ranks
        make(self, 1)

    patch.setattr(TierJobs, "__init__", make_for_one)


def keep_copies_of_evicted_pages(patch: Patch) -> None:
    """A copy in host memory counts although its page may have been reused for other tokens."""
    patch.setattr(PrefixTree, "entry", lambda _self, _key: None)


def believe_failed_copies(patch: Patch) -> None:
    on_result = TierJobs.on_result

    def all_done(self: TierJobs, result: TierJobResult, now_s: float) -> bool:
        return on_result(self, replace(result, done=[True] * len(result.done)), now_s)

    patch.setattr(TierJobs, "on_result", all_done)
