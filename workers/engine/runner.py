"""Forward pass of one rank, which executes step plans and keeps the page tables of its requests."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from cluster.grammar import Grammars
from cluster.spec.ids import Room
from cluster.spec.kv import pages_for
from cluster.spec.registry import KvOwnership
from cluster.spec.sampling import Sampling, TokenLogprobs
from cluster.spec.step_messages import ScheduledRequest, StepPlan
from cluster.spec.strategy import Passing, Strategy
from workers.attention.interface import AttentionBackend
from workers.context_parallel.shard_plan import dummy_request, join_shapes, make_step_shape
from workers.engine.attention_context import make_context
from workers.engine.batch import StepInput, build_step_batch
from workers.engine.begun_step import BegunStep, SampledTokens
from workers.engine.captures import Capture
from workers.engine.decode_graphs import DecodeGraphs
from workers.engine.known_requests import KnownRequest
from workers.engine.logits_processors import SamplingState
from workers.engine.prompt_logprobs import Asked, prompt_logprobs
from workers.engine.rank_groups import RankGroups
from workers.engine.sampler import begin_sample, draw
from workers.engine.step_context import CpExchange, StepContext
from workers.memory.layerwise_load import LayerwiseLoad
from workers.memory.page_pool import OnStored, PagePool
from workers.models.decoder import DecoderModel


class ModelRunner:
    """Executor of step plans. Every rank of a replica runs the same plans in the same order."""

    def __init__(
        self,
        model: DecoderModel,
        pool: PagePool,
        backend: AttentionBackend,
        groups: RankGroups,
        ownership: KvOwnership = KvOwnership.REPLICATED,
        grammars: Grammars | None = None,
    ) -> None:
        """Create the runner. The sampling rank needs ``grammars``."""
        self._graphs: DecodeGraphs | None = None
        self.graph_bytes = 0
        """GPU memory in bytes that captured steps hold."""
        self.why_not_captured = ""
        """Reason why this decode worker captures no steps. Empty if it captures them."""
        self._not_captured: Counter[str] = Counter()
        self.requests: dict[Room, KnownRequest] = {}
        self._sampling_states: dict[Room, SamplingState] = {}
        """Sampling states, on the sampling rank, of requests whose settings change logits. Created at first use."""
        self._owners = groups.cp.size if ownership is KvOwnership.SHARDED else 1
        self._null_page = pool.num_pages * self._owners
        self._grammars = grammars
        self.model = model
        self.pool = pool
        self.backend = backend
        self.groups = groups
        self._exchange = CpExchange(groups.cp)
        self._sampled = SampledTokens()
        """Tokens of the latest step in which this rank's TP group sampled."""

    def run_dummy(
        self,
        num_tokens: int,
        prefix_len: int = 0,
        strategy: Strategy = Strategy.CONTIGUOUS,
        passing: Passing | None = None,
        num_requests: int = 1,
    ) -> None:
        """Run a dummy prompt step of equal requests in the null page. Every rank of the replica calls this."""
        num_pages = pages_for(prefix_len + num_tokens, self.pool.page_size)
        # Owners take turns, as in every request.
        null_pages = self._null_page + np.arange(num_pages, dtype=np.int64) % self._owners
        scheduled = [dummy_request(num_tokens, prefix_len)] * num_requests
        dp, cp = self.model.groups.parallel.dp, self.groups.cp.size
        shape = join_shapes([make_step_shape(scheduled, strategy, passing, cp)] * dp, cp)[0]
        with torch.inference_mode():
            tables = [[null_pages] * num_requests] * self.pool.num_lifetimes
            context, hidden = self._compute(StepInput(scheduled, tables, shape))
            if self.groups.pipeline.is_last:
                self.model.logits(context.last_layer.gather_sampled(hidden))

    def sample_dummy(self, num_rows: int) -> None:
        """Sample dummy tokens with top-p. Every rank of the replica calls this."""
        if not self.groups.pipeline.is_last:
            return
        model, sampling = self.model, Sampling(temperature=1.0, top_p=0.5, seed=0)
        with torch.inference_mode():
            hidden = torch.zeros(
                num_rows, model.config.hidden_size, dtype=model.dtype, device=model.device.torch_device
            )
            logits = model.logits(hidden)
            if self.groups.is_sampling_rank:
                draw(logits, [sampling] * num_rows, range(num_rows))

    def capture_decode(self, most_requests: int, capture: Capture) -> str:
        """Capture decode steps with up to ``most_requests`` requests, and replay them from now on. Return the reason if
        none can be captured, otherwise an empty string.

        Every rank of the replica calls this. The replica must have one stage and no context parallelism.
        """
        assert self.groups.cp.size == 1, "decode has no context parallelism"
        assert not self.groups.pipeline.links, "decode steps cannot be captured with several stages"

        device = self.model.device
        used = device.used_bytes()
        with torch.inference_mode():
            self._graphs = DecodeGraphs(self.model, self.pool, self.backend, most_requests, capture)
        self.graph_bytes = max(device.used_bytes() - used, 0)
        return self._graphs.why_none

    def drop_graphs(self) -> None:
        """Release captured steps, and replay none from now on. Call this before leaving groups whose collectives were
        captured.
        """
        if self._graphs is not None:
            self._graphs.drop()

    @property
    def graph_steps(self) -> dict[str, int]:
        """Return the number of replayed steps and, by reason, of all other steps. Empty except in decode workers."""
        return dict(self._not_captured if self._graphs is None else self._graphs.counts + self._not_captured)

    @property
    def is_asynchronous(self) -> bool:
        """Return whether steps run in the background, so that the next one can be planned meanwhile."""
        return self.model.device.is_asynchronous

    def begin(self, plan: StepPlan, load: LayerwiseLoad | None = None, on_stored: OnStored | None = None) -> BegunStep:
        """Start a step, which may use tokens that the previous step has not sampled yet. On a CPU, compute all of it.

        ``load`` is the plan's ``layerwise_load``. See ``PagePool.in_step`` for ``on_stored``, which is not called in
        replayed steps.
        """
        self._update_requests(plan)
        with torch.inference_mode(), self.pool.in_step(load, on_stored):
            sampled = self._forward(plan) if any(plan.shape.shard_lens) else SampledTokens()
        # Sampled tokens arrive after everything else.
        end = self.model.device.record_event() if sampled.pending is None else None
        return BegunStep({request.room: self.requests[request.room] for request in plan.scheduled}, sampled, end)

    def _update_requests(self, plan: StepPlan) -> None:
        for room in plan.releases:
            self.requests.pop(room, None)
            self._sampling_states.pop(room, None)
        for new in plan.new_requests:
            self.requests[new.room] = KnownRequest.of(new, self.pool.num_lifetimes)
        for scheduled in plan.scheduled:
            for table, pages in zip(self.requests[scheduled.room].tables, scheduled.new_pages, strict=False):
                table.extend(pages, self._null_page)

    def _forward(self, plan: StepPlan) -> SampledTokens:
        known = [self.requests[request.room] for request in plan.scheduled]
        page_tables = [
            [request.tables[lifetime].all for request in known] for lifetime in range(self.pool.num_lifetimes)
        ]
        previous = self._sampled.input_of(plan.scheduled, self.model.groups.tp, self.model.device)
        step = StepInput(plan.scheduled, page_tables, plan.shape, previous)
        sampled_hidden = self._replay(step, is_loading=plan.layerwise_load is not None)
        if sampled_hidden is None:
            context, hidden = self._compute(step)
            if not self.groups.pipeline.is_last:
                return SampledTokens()
            if context.batch.is_scored:
                self._score_prompts(plan.scheduled, context, hidden)
            sampled_hidden = context.last_layer.gather_sampled(hidden)
        sampled = [request for request in plan.scheduled if request.samples]
        if not sampled:
            # Without logits, ranks do not wait for each other, but the leader's step must not end before all ranks have
            # written.
            self.model.groups.tp.all_reduce(torch.zeros(1, device=self.model.device.torch_device))
        if not sampled or self.groups.cp.rank > 0:
            return SampledTokens()
        logits = self.model.logits(sampled_hidden)
        if self.groups.is_sampling_rank:
            self._sampled = self._begin_sample(sampled, logits)
        else:
            self._sampled = SampledTokens([request.room for request in sampled])
        return self._sampled

    def _replay(self, step: StepInput, *, is_loading: bool) -> torch.Tensor | None:
        """Return the final hidden states of a captured step. None if the step must be computed."""
        has_graphs = self._graphs is not None
        reason = "layerwise load" if has_graphs and is_loading else self.why_not_captured
        if reason:
            self._not_captured[reason] += 1
        return None if self._graphs is None or reason else self._graphs.run(step)

    def _compute(self, step: StepInput) -> tuple[StepContext, torch.Tensor]:
        """Return the context of a step, and the hidden states ``[queries, hidden]`` of this rank's tokens.

        A stage other than the last sends its hidden states to the next stage.
        """
        batch = build_step_batch(
            step,
            cp=self.groups.cp.size,
            cp_rank=self.groups.cp.rank,
            page_size=self.pool.page_size,
            null_slot=self.pool.null_slot,
            device=self.model.device,
            owners=self._owners,
        )
        context = make_context(batch, self.pool, self.backend, self._exchange)
        hidden = self.model(batch.token_ids, batch.positions, context, self._receive(context))
        self._send(hidden, context)
        return context, hidden

    def _receive(self, context: StepContext) -> torch.Tensor | None:
        """Return the hidden states of the previous stage, and pass on the keys that it has selected."""
        model, pipeline = self.model, self.groups.pipeline
        if pipeline.is_first:
            return None

        def receive(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return pipeline.receive(torch.empty(shape, dtype=dtype, device=model.device.torch_device))

        hidden = receive(len(context.batch.token_ids), model.config.hidden_size, dtype=model.dtype)
        if model.begins_shared and (top_k := model.selected_keys(context)):
            context.selection = receive(context.num_selecting, top_k, dtype=torch.int32)
        return hidden

    def _send(self, hidden: torch.Tensor, context: StepContext) -> None:
        """Send hidden states to the next stage, and the selected keys if its first layer uses them."""
        pipeline = self.groups.pipeline
        pipeline.send(hidden)
        if self.model.ends_shared and self.model.selected_keys(context):
            assert context.selection is not None, "a layer before has an indexer"
            pipeline.send(context.selection)

    def _score_prompts(self, scheduled: Sequence[ScheduledRequest], context: StepContext, hidden: torch.Tensor) -> None:
        known = [self.requests[request.room] for request in scheduled]
        asked = [
            Asked(request.scored_ids, each.sampling.num_prompt_logprobs or 0)
            for request, each in zip(scheduled, known, strict=True)
        ]
        logprobs = prompt_logprobs(self.model, self.groups.cp, context.batch, hidden, asked)
        if self.groups.is_sampling_rank:
            for request, added in zip(known, logprobs, strict=True):
                request.prompt_logprobs.extend(added)

    def _begin_sample(self, scheduled: Sequence[ScheduledRequest], logits: torch.Tensor) -> SampledTokens:
        logprobs: dict[Room, list[TokenLogprobs]] = {}
        states: dict[int, SamplingState] = {}
        rooms = [request.room for request in scheduled]
        sampled = [self.requests[room] for room in rooms]
        for row, known in enumerate(sampled):
            room = known.room
            if known.sampling.changes_logits:
                if room not in self._sampling_states:
                    self._sampling_states[room] = SamplingState(known, self.model.config.vocab_size, self._grammars)
                states[row] = self._sampling_states[room]
            # Prompt log-probabilities are reported with the first token.
            if known.prompt_logprobs:
                logprobs[room] = list(known.prompt_logprobs)
                known.prompt_logprobs.clear()
        positions = [request.output_position for request in scheduled]
        draws = begin_sample(logits, [known.sampling for known in sampled], states, positions)
        return SampledTokens(rooms, draws, logprobs)
