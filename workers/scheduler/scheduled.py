"""Step plan entries of one sequence, and the scheduler's bookkeeping for them."""

from cluster.spec.step_messages import Admit, ScheduledRequest
from workers.scheduler.sequence import Sequence

_UNKNOWN = 0
"""Placeholder of a token that has yet to be sampled."""


def admit(sequence: Sequence, step: int) -> Admit:
    """Announce the request to the ranks with this step."""
    params, sequence.kv.admitted_step = sequence.params, step
    return Admit(
        room=sequence.room,
        prompt_len=params.prompt_len,
        owner_base=sequence.owner_base,
        sampling=params.sampling,
        history=list(sequence.tokens) if params.sampling.looks_back else [],
        target=sequence.target,
        traced=params.traced,
    )


def schedule(sequence: Sequence, count: int) -> ScheduledRequest:
    """Plan the next ``count`` tokens of a sequence."""
    kv = sequence.kv
    start = kv.num_planned_tokens
    token_ids = sequence.tokens[start : start + count]
    kv.num_planned_tokens += count
    is_longer = kv.num_pages > kv.num_announced_pages
    new_pages = [pages[kv.num_announced_pages :] for pages in kv.pages] if is_longer else []
    kv.num_announced_pages = kv.num_pages
    # Only once, not when the prompt is computed again.
    is_scored = sequence.params.sampling.num_prompt_logprobs is not None and not sequence.num_outputs
    return ScheduledRequest(
        room=sequence.room,
        first_position=start,
        token_ids=token_ids or [_UNKNOWN],
        input_from_previous_step=not token_ids,
        new_pages=new_pages,
        samples=kv.num_planned_tokens == len(sequence.tokens) + kv.num_pending_samples,
        output_position=sequence.num_outputs + kv.num_pending_samples,
        targets=sequence.tokens[start + 1 : start + 1 + count] if is_scored else [],
    )
