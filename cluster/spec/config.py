"""Keys of the deploy file with their defaults and meanings, as a frozen tree. Checks across keys are in checks.py."""

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cluster.spec.clock import MOST_S
from cluster.spec.config_node import ChunkTokens, MemoryGib, Node, PositiveInt, PositiveSeconds, Text
from cluster.spec.hicache_config import HicacheConfig
from cluster.spec.ids import Role
from cluster.spec.linear_shards import LinearShards
from cluster.spec.registry import KvOwnership, TransferMode, Verify
from cluster.spec.router_config import RouterConfig
from cluster.spec.strategy import (
    Collectives,
    CpMode,
    MoeDispatch,
    PassingSetting,
    ShardLinear,
    StrategySetting,
)

CPU_POOL_GIB = 1.0
"""Default memory of a CPU worker's page pool, enough for the demo model on a laptop."""
MOST_REPLICAS = 4096
"""Maximum number of replicas of a role."""


class Device(StrEnum):
    """Devices that workers compute on."""

    CPU = "cpu"
    CUDA = "cuda"


class AttentionSetting(StrEnum):
    """Attention backends."""

    AUTO = "auto"
    """The fastest backend that the machine supports."""
    TRITON = "triton"
    """Triton kernels on a GPU."""
    FLASH_ATTN = "flash_attn"
    """FlashAttention on a GPU, in bf16; Triton where it cannot run."""
    NATIVE = "native"
    """Baton's own kernels on a CPU; includes norms, rotations and gates."""
    TORCH = "torch"
    """Reference implementation for any device; slow on a GPU, and decode steps are not captured."""


class LogFormat(StrEnum):
    """Formats of log records."""

    TEXT = "text"
    JSON = "json"


class ModelConfig(Node):
    """The model to serve."""

    path: Text = "recall"
    """Local folder in Hugging Face format, Hugging Face repository, or built-in model: `recall`, `recall-moe`,
    `recall-latent`, `recall-sparse`."""
    served_name: Text | None = None
    """Name of the model for clients; by default the last part of its path."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of weights and KV; `auto` uses that of the checkpoint."""
    max_context: PositiveInt | None = None
    """Maximum number of tokens of a prompt and its answer together; by default the model's own limit."""
    sampling_defaults: Literal["model", "openai"] = "model"
    """Source of parameters that a request does not set: the model's `generation_config.json` (temperature, top_k,
    top_p, min_p, repetition_penalty, max_new_tokens), or OpenAI's defaults, which are temperature 1 and no limits."""

    @property
    def name(self) -> str:
        return self.served_name or self.path.rstrip("/").rsplit("/", 1)[-1]

    def longest_context(self, of_model: int) -> int:
        """Return the maximum number of tokens of a prompt and its answer, given the model's own limit."""
        return self.max_context or of_model


class KvConfig(Node):
    """The page pool of each worker."""

    page_size: PositiveInt = 64
    """Number of tokens per KV page, on prefill and decode alike."""
    memory_gib: MemoryGib | None = None
    """Memory for the KV pages of one worker, in GiB; by default 1 on a CPU, and on a GPU what `memory_fraction`
    leaves."""
    memory_fraction: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.9
    """Fraction of a worker's GPU memory for weights, activations, CUDA graphs and KV pages. Unless `memory_gib` is set,
    the KV pages get what remains once the others are measured at startup."""
    prefix_cache: bool = True
    """Keep the pages of finished requests for prompts with the same prefix until the memory is needed."""


class _Axes(Node):
    dp: PositiveInt = 1
    """Number of data-parallel attention ranks; each has its own requests and KV; MLPs and experts are divided among
    them."""
    tp: PositiveInt = 1
    """Number of tensor-parallel ranks; each computes some of the heads."""
    pp: PositiveInt = 1
    """Number of pipeline stages; each computes some of the layers."""
    ep: PositiveInt = 1
    """Number of expert-parallel ranks; each holds some of the experts."""


class ParallelConfig(_Axes):
    """The parallel sizes of one prefill replica, which has dp*cp*tp*pp workers."""

    cp: PositiveInt = 1
    """Number of context-parallel ranks; each computes some tokens of a prompt."""
    moe_dp: PositiveInt = 1
    """Number of copies of the experts in one pipeline stage: 1 or cp."""


class DecodeParallelConfig(_Axes):
    """The parallel sizes of one decode replica, which has dp*tp*pp workers."""

    cp: ClassVar[int] = 1
    """One rank: a decode step has one query token per request, which cannot be divided over CP ranks."""
    moe_dp: ClassVar[int] = 1
    """One copy of the experts, because further copies need further CP ranks."""


AnyParallel = ParallelConfig | DecodeParallelConfig


class PoolConfig(Node):
    """The keys that prefill and decode have in common."""

    replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS, strict=True)] = 1
    """Number of replicas of this role."""
    parallel: AnyParallel
    """Parallel sizes of each replica."""
    max_requests: PositiveInt = 64
    """Maximum number of requests in one step of each DP rank."""

    @property
    def ownership(self) -> KvOwnership:
        """Location of a request's KV in a CP group."""
        return KvOwnership.REPLICATED

    @property
    def num_owners(self) -> int:
        """Number of CP ranks that the pages of a request are divided over."""
        return self.ownership.num_owners(self.parallel.cp)

    @property
    def linear_shards(self) -> LinearShards | None:
        """Division of query and output projections among CP ranks; None if every rank stores all of them."""
        return None


class PrefillConfig(PoolConfig):
    """The replicas that compute prompts."""

    parallel: ParallelConfig = ParallelConfig()
    """Parallel sizes of each replica."""
    strategy: StrategySetting = StrategySetting.AUTO
    """Division of a step's tokens over CP ranks; `auto` picks the fastest strategy for each step from measured
    rates."""
    mode: CpMode = CpMode.GATHER
    """Location of KV during prefill: with `gather`, every CP rank holds all of it; with `ring`, each rank holds the
    pages it owns, so that capacity grows with cp."""
    passing: PassingSetting = PassingSetting.AUTO
    """Tensors that ranks pass around the ring: keys and values, or queries; `auto` picks the faster for each step."""
    shard_linear: ShardLinear = ShardLinear.NONE
    """Sharding of query and output projections over CP ranks: with `none`, every rank holds all; with `broadcast`,
    those of every cp-th layer; with `gather`, a part of each layer's. Ranks send them to each other ahead of use."""
    chunk_tokens: ChunkTokens = 8192
    """Maximum number of tokens in one step of each DP rank, over all requests."""
    skip_below_tokens: Annotated[int, Field(ge=0, strict=True)] = 0
    """Number of uncached prompt tokens below which decode computes a prompt itself, without prefill; 0 for never."""
    max_queued_tokens: PositiveInt = 8_388_608
    """Maximum number of prompt tokens that wait at one replica; when all are full, requests wait in the router."""

    @property
    def ownership(self) -> KvOwnership:
        """Location of a request's KV in a CP group; the KV of a single rank is not sharded."""
        is_ring = self.mode is CpMode.RING and self.parallel.cp > 1
        return KvOwnership.SHARDED if is_ring else KvOwnership.REPLICATED

    @property
    def linear_shards(self) -> LinearShards | None:
        """Division of query and output projections among CP ranks; None if every rank stores all of them."""
        if self.shard_linear is ShardLinear.NONE:
            return None
        return LinearShards(self.shard_linear, self.parallel.cp)


class DecodeConfig(PoolConfig):
    """The replicas that stream answers."""

    parallel: DecodeParallelConfig = DecodeParallelConfig()
    """Parallel sizes of each replica."""
    chunk_tokens: ChunkTokens = 2048
    """Maximum number of tokens in one step of each DP rank, when decode computes a prompt or recomputes a request."""
    max_fill: Annotated[float, Field(ge=1, strict=True, allow_inf_nan=False)] = 16.0
    """Maximum total of prompt tokens and longest possible answers at one replica, as a multiple of its KV pool; further
    requests wait in the router."""


Pool = PrefillConfig | DecodeConfig


class TransferBackendName(StrEnum):
    """Backends that move KV between workers."""

    SHARED_MEMORY = "shared_memory"
    MOONCAKE = "mooncake"


class TransferProtocol(StrEnum):
    """Network protocols of Mooncake."""

    TCP = "tcp"
    RDMA = "rdma"


class TransferConfig(Node):
    """The transfer of KV from prefill to decode."""

    backend: TransferBackendName = TransferBackendName.SHARED_MEMORY
    """Transfer backend: `shared_memory` on one host, `mooncake` between hosts."""
    protocol: TransferProtocol = TransferProtocol.TCP
    """Protocol of `mooncake`: `tcp`, or `rdma`, which reaches GPU memory directly if the system allows it; otherwise,
    the worker's log says why."""
    mode: TransferMode = TransferMode.ALL_RANKS
    """CP ranks that send KV: with `all_ranks`, each sends its own pages; with `rank0`, rank 0 sends all pages."""
    verify: Verify | None = None
    """Checks of received KV before decode uses it: `counts` of pages and bytes, or also a `digest` of each page; by
    default `digest` on CPUs and `counts` on GPUs, where a digest reads every page once more."""
    transfer_timeout_s: PositiveSeconds = 60.0
    """Seconds without a message from prefill after which decode gives up on a transfer that has begun."""


class ResourcesConfig(Node):
    """The resources of the cluster, and the supervision of its processes."""

    device: Device = Device.CPU
    """Device of each worker: CPU cores, or a GPU."""
    cpus_per_worker: Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)] = 1.0
    """Number of Ray CPUs reserved for each worker."""
    threads_per_worker: PositiveInt = 1
    """Number of compute threads of each worker on a CPU. With 1, threads of the lowest priority also share its steps
    while cores are idle, if there are more cores than its replica has ranks."""
    gpus_per_worker: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    """Fraction of a GPU for each worker. Below 1, workers share a GPU and exchange tensors through host memory."""
    gpu_memory_gib: MemoryGib = 139.0
    """Memory of one GPU, in GiB, for the estimates of `baton plan`; workers query the GPU."""
    machine_memory_gib: MemoryGib | None = None
    """Memory of one machine, in GiB; a configuration that needs more is refused. By default, `baton up` uses the
    memory of its own machine if all workers run there on CPUs."""
    attention: AttentionSetting = AttentionSetting.AUTO
    """Attention backend; `auto` uses the fastest one for the device, and the worker's log says which and why. `torch`,
    for any device, is the reference."""
    collectives: Collectives = Collectives.AUTO
    """Transport of tensors between the ranks of a replica: `auto` uses shared memory between ranks on one host; `tcp`
    never does."""
    moe_dispatch: MoeDispatch = MoeDispatch.AUTO
    """Exchange of tokens between expert ranks; `auto` uses whichever moves fewer bytes, but on GPUs `gather` for
    up to 4,096 tokens."""
    ray_dashboard: Annotated[bool, Field(strict=True)] = False
    """Start Ray's dashboard too if `baton up` starts Ray; `ray list` needs it. `baton status` shows its address."""
    start_timeout_s: PositiveSeconds = 300.0
    """Seconds to wait for all replicas to be ready once their machines have the model's files; in an existing Ray
    cluster, also the limit on the wait for machines with enough resources."""
    silence_s: PositiveSeconds = 10.0
    """Seconds without a sign of life after which a rank (and its replica), a router process or the bootstrap service
    is restarted."""
    step_timeout_s: Annotated[float, Field(ge=5, le=MOST_S, strict=True)] = 300.0
    """Seconds after which a rank's process exits if its work loop makes no progress; must be well above the duration of
    the longest step."""

    @property
    def uses_nccl(self) -> bool:
        """True if NCCL connects the ranks of a replica. It needs a whole GPU for each rank."""
        return self.device is Device.CUDA and self.collectives is Collectives.AUTO and self.gpus_per_worker == 1


class LogConfig(Node):
    """The log files of all processes, which `baton logs` shows. They never contain prompts, answers or keys."""

    format: LogFormat = LogFormat.TEXT
    """Format of log records: `text`, or `json`, one object per line, with room, replica and request id where known."""
    requests: Annotated[bool, Field(strict=True)] = False
    """Log a record for every request sent to replicas: its API key's name, its replicas, and the time of each phase."""


class DeployConfig(Node):
    """All keys of a deploy file."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] = "baton"
    """Name of the cluster: lowercase letters, digits and dashes."""
    model: ModelConfig = ModelConfig()
    """The model to serve."""
    kv: KvConfig = KvConfig()
    """The page pool of each worker."""
    prefill: PrefillConfig = PrefillConfig()
    """The replicas that compute prompts."""
    decode: DecodeConfig = DecodeConfig()
    """The replicas that stream answers."""
    hicache: HicacheConfig = HicacheConfig()
    """KV tiers below the device cache."""
    transfer: TransferConfig = TransferConfig()
    """The transfer of KV from prefill to decode."""
    router: RouterConfig = RouterConfig()
    """The HTTP endpoint."""
    resources: ResourcesConfig = ResourcesConfig()
    """The resources of the cluster."""
    log: LogConfig = LogConfig()
    """The log that processes write to standard error."""

    @property
    def pools(self) -> dict[Role, Pool]:
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode}

    def verify_by(self) -> Verify:
        """Return the configured check of received KV, or the device's default."""
        return self.transfer.verify or (Verify.DIGEST if self.resources.device is Device.CPU else Verify.COUNTS)

    @property
    def uses_gloo(self) -> bool:
        """True if ranks may use TCP: it is configured, or NCCL does not connect ranks on several machines."""
        if self.resources.collectives is Collectives.TCP:
            return True
        return not self.resources.uses_nccl and self.transfer.backend is not TransferBackendName.SHARED_MEMORY

    @property
    def collectives_in_background(self) -> bool:
        """False if ranks copy data through shared memory themselves, and compute nothing meanwhile."""
        return self.resources.uses_nccl or self.uses_gloo

    @property
    def kv_memory_gib(self) -> float | None:
        """Memory of one worker's page pool, in GiB; None if the pool takes what is left of the GPU's memory."""
        return self.kv.memory_gib or (CPU_POOL_GIB if self.resources.device is Device.CPU else None)
