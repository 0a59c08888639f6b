"""What the decode leader tells a router of a step. Pure."""

from dataclasses import dataclass, field

from cluster.spec.messages import Output, PhaseTimes
from cluster.spec.peer import Peer
from cluster.spec.sampling import FinishReason, Sampled, TokenLogprobs
from cluster.spec.tiers import CachedTokens
from workers.scheduler.sequence import Sequence

NOT_CACHED = CachedTokens()


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What goes with a token."""

    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Its own, where they are asked for."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt, with the first token."""
    cached: CachedTokens = NOT_CACHED
    phases: PhaseTimes | None = None


_NOTHING = Told()


def told_of(drawn: Sampled) -> Told:
    """What goes with a token that is not the first."""
    return _NOTHING if drawn.logprobs is None else Told(logprobs=[drawn.logprobs])


def newest_output(me: Peer, sequence: Sequence, finish: FinishReason | None, told: Told) -> Output:
    """The newest token of a sequence."""
    return Output(
        room=sequence.room,
        replica=me.replica,
        incarnation=me.incarnation,
        first_index=sequence.num_outputs - 1,
        token_ids=sequence.tokens[-1:],
        logprobs=told.logprobs,
        prompt_logprobs=told.prompt_logprobs,
        finish=finish,
        cached=told.cached,
        phases=told.phases,
    )
