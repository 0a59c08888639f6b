"""The deploy YAML as a frozen tree: every knob, its default and what it means. Checks across keys are in checks.py."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from cluster.spec.config_node import MemoryGib, Node, Origin, PositiveInt, PositiveSeconds, Text
from cluster.spec.hicache_config import HicacheConfig
from cluster.spec.log_config import LogConfig
from cluster.spec.registry import KvOwnership, PageFilter, TransferMode, Verify
from cluster.spec.strategy import Collectives, CpMode, DpPolicy, MoeDispatch, PassingSetting, StrategySetting

PolicyName = Literal[
    "round_robin",
    "random",
    "power_of_two",
    "least_requests",
    "least_tokens",
    "prefix_aware",
    "session",
    "follow_room",
]


CPU_POOL_GIB = 1.0
"""Memory of a worker's pool where nothing is said."""


class Device(StrEnum):
    """What the workers compute on."""

    CPU = "cpu"
    CUDA = "cuda"


class AttentionSetting(StrEnum):
    """What computes attention."""

    AUTO = "auto"
    """The fastest that the machine has."""
    TRITON = "triton"
    """On a GPU; pages of any size."""
    FLASH_ATTN = "flash_attn"
    """On a GPU, in bf16, by the package of this name where it can, by triton elsewhere."""
    NATIVE = "native"
    """On a CPU, in bf16; norms, rotations and gates are then native too."""
    TORCH = "torch"
    """On any device; the reference. Slow on a GPU, which then records no decode steps."""


class ModelConfig(Node):
    """Which model is served."""

    path: Text = "recall"
    """A local folder in Hugging Face format, a Hugging Face repository, or a built-in model: `recall`, `recall-moe`."""
    served_name: Text | None = None
    """Name clients use; the last part of the path by default."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of weights and KV; auto takes the checkpoint's own."""
    max_context: PositiveInt | None = None
    """Most tokens of prompt and answer together; the model's own limit by default."""
    sampling_defaults: Literal["model", "openai"] = "model"
    """What holds for fields that a request leaves out: temperature, top_k, top_p, min_p and repetition_penalty of the
    model's `generation_config.json`, or OpenAI's, which are temperature 1 and no limits."""

    @property
    def name(self) -> str:
        """The name clients use."""
        return self.served_name or self.path.rstrip("/").rsplit("/", 1)[-1]


class KvConfig(Node):
    """The page pool of each worker."""

    page_size: PositiveInt = 64
    """Tokens per page; equal on both sides."""
    memory_gib: MemoryGib | None = None
    """Memory of the pool of one worker, in GiB; by default 1 on a CPU, and on a GPU what `memory_fraction` leaves."""
    memory_fraction: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.9
    """Part of a GPU's memory for weights, activations, CUDA graphs and pool, which takes what those are measured to
    leave at start, where `memory_gib` is not given."""
    prefix_cache: bool = True
    """Keep the pages of finished requests for prompts that begin alike, as long as nobody else needs the memory."""


class ParallelConfig(Node):
    """How one replica is cut over workers; dp*cp*tp*pp of them."""

    dp: PositiveInt = 1
    """Data parallel attention: ranks with requests and KV of their own, that share MLPs and experts."""
    cp: PositiveInt = 1
    """Context parallel ranks: parts of a prompt's tokens. 1 on decode."""
    tp: PositiveInt = 1
    """Tensor parallel ranks: parts of the heads."""
    pp: PositiveInt = 1
    """Pipeline stages: parts of the layers."""
    moe_dp: PositiveInt = 1
    """Copies of the experts in one stage."""
    ep: PositiveInt = 1
    """Expert parallel ranks."""


class PoolConfig(Node):
    """What prefill and decode have in common."""

    replicas: Annotated[int, Field(ge=1, le=4096, strict=True)] = 1
    """Replicas of this role."""
    parallel: ParallelConfig = ParallelConfig()
    """How each replica is cut."""
    max_requests: PositiveInt = 64
    """Most requests in one step of each DP rank of a replica."""
    kv_memory_gib: MemoryGib | None = None
    """Memory of the page pool of one worker of this role, in GiB; `kv.memory_gib` by default."""
    dp_policy: DpPolicy = DpPolicy.LEAST_TOKENS
    """Which DP rank of a replica gets a request; `X-data-parallel-rank` goes before it where there is such a rank."""
    moe_dispatch: MoeDispatch = MoeDispatch.AUTO
    """How tokens reach their experts; auto takes what moves fewer bytes, on GPUs from 4,097 tokens on."""

    @property
    def ownership(self) -> KvOwnership:
        """Where the KV of a request lives in the CP group of a replica."""
        return KvOwnership.REPLICATED

    @property
    def num_owners(self) -> int:
        """CP ranks that the pages of a request are divided over."""
        return self.ownership.num_owners(self.parallel.cp)


class PrefillConfig(PoolConfig):
    """The replicas that compute prompts."""

    strategy: StrategySetting = StrategySetting.AUTO
    """How a step's tokens are divided over CP ranks; auto takes the fastest way for each step, by measured rates."""
    mode: CpMode = CpMode.GATHER
    """`gather`: each CP rank holds all KV; `ring`: each holds the pages it owns, so that capacity grows with cp."""
    passing: PassingSetting = PassingSetting.AUTO
    """What goes round in ring mode, keys and values or queries; auto takes the faster for each step."""
    chunk_tokens: PositiveInt = 8192
    """Most tokens computed in one step of each DP rank, over all its requests."""
    skip_below_tokens: Annotated[int, Field(ge=0, strict=True)] = 0
    """Prompts with fewer tokens that decode has not cached are computed by decode itself; 0 for none."""
    max_queued_tokens: PositiveInt = 8_388_608
    """Prompt tokens before one replica at which it gets no more; when all replicas have so many, clients get 429."""

    @property
    def ownership(self) -> KvOwnership:
        """Where the KV of a request lives in the CP group of a replica; a ring of one rank is no ring."""
        is_ring = self.mode is CpMode.RING and self.parallel.cp > 1
        return KvOwnership.SHARDED if is_ring else KvOwnership.REPLICATED


class DecodeConfig(PoolConfig):
    """The replicas that stream answers."""

    chunk_tokens: PositiveInt = 2048
    """Most tokens computed in one step of each DP rank when a request must be recomputed here."""
    max_fill: Annotated[float, Field(ge=1, strict=True, allow_inf_nan=False)] = 16.0
    """Most prompts and longest possible answers at one replica, in its pools; beyond it requests wait in the router."""


class TransferBackendName(StrEnum):
    """What moves KV bytes between workers."""

    SHARED_MEMORY = "shared_memory"
    MOONCAKE = "mooncake"


class TransferProtocol(StrEnum):
    """How bytes reach another host."""

    TCP = "tcp"
    RDMA = "rdma"


class TransferConfig(Node):
    """How KV goes from prefill to decode."""

    backend: TransferBackendName = TransferBackendName.SHARED_MEMORY
    """`shared_memory` on one host, `mooncake` between hosts."""
    protocol: TransferProtocol = TransferProtocol.TCP
    """Of `mooncake`: `tcp`, or `rdma`, by which peers reach the pages of GPUs without the host where its system lets
    them; the worker's log says why they do not."""
    mode: TransferMode = TransferMode.ALL_RANKS
    """Which CP ranks send: `all_ranks`, each its own pages, or `rank0` all of them."""
    page_filter: PageFilter = PageFilter.MODULAR
    """How pages are divided when all ranks send: `modular`, one after another, or `contiguous`, in one run each."""
    verify: Verify | None = None
    """What decode checks before it uses KV: `counts` of pages and bytes, or a `digest` of each page as well; by default
    `digest` on CPUs, and `counts` on GPUs, where every page would pass through the host's caches once more."""
    transfer_timeout_s: PositiveSeconds = 60.0
    """Longest silence of prefill after its first word about a transfer: the result, or the end of one rank's part."""


ToolParserName = Literal["auto", "hermes", "llama3", "none"]
ReasoningParser = Literal["auto", "qwen3", "none"]


class RouterConfig(Node):
    """The HTTP endpoint."""

    host: Text = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535, strict=True)] = 8000
    """Port to listen on; 0 takes a free one."""
    processes: Annotated[int, Field(ge=1, le=64, strict=True)] = 1
    """Router processes that share the port. Each has an equal share of every limit on requests and tokens (keys, queue,
    room at replicas), the remainder going to the first ones, and 1 at least."""
    prefill_policy: PolicyName = "prefix_aware"
    """How a prefill replica is picked."""
    decode_policy: PolicyName = "least_tokens"
    """How a decode replica is picked."""
    tool_parser: ToolParserName = "auto"
    """How the model writes tool calls; auto tells it from the chat template."""
    reasoning_parser: ReasoningParser = "auto"
    """Whether thoughts (`<think>`) are split off answers; auto does so where the chat template knows them."""
    max_waiting_requests: Annotated[int, Field(ge=0, strict=True)] = 256
    """Most requests that wait in the router for room at the replicas; further ones get 429."""
    max_wait_s: PositiveSeconds = 10.0
    """Longest wait in the router; then the answer is 429."""
    api_keys_file: Text | None = None
    """YAML list of API keys (name, key, max_requests, tokens_per_minute, priority); anybody may ask without any key."""
    allowed_origins: tuple[Origin, ...] = ()
    """Origins whose pages may use the endpoint from a browser (CORS); `["*"]` for all, none by default."""
    key_max_requests: PositiveInt | None = None
    """Most open requests of one API key; no limit by default."""
    key_tokens_per_minute: PositiveInt | None = None
    """Most tokens of prompts and answers of one API key in a minute; no limit by default."""
    max_body_mib: Annotated[int, Field(ge=1, le=64, strict=True)] = 64
    """Longest body of a request, in MiB; 64 is a prompt of some ten million tokens."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt of one request, in tokens; as long as fits by default."""
    request_timeout_s: PositiveSeconds = 3600.0
    """Longest life of one request."""
    max_retries: Annotated[int, Field(ge=0, le=16, strict=True)] = 3
    """Most further attempts of a request after one has failed, before and after its first token together."""
    drain_s: PositiveSeconds = 20.0
    """Longest wait for open requests, and for pages that `hicache` stores, when the cluster stops."""


class ResourcesConfig(Node):
    """What the cluster runs on, and how its processes are watched."""

    device: Device = Device.CPU
    """What each worker computes on: CPU cores, or one GPU."""
    cpus_per_worker: Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)] = 1.0
    """Ray CPUs reserved for each worker."""
    threads_per_worker: PositiveInt = 1
    """Compute threads of each worker on a CPU."""
    gpu_memory_gib: MemoryGib = 139.0
    """Memory of one GPU, in GiB, that `baton plan` reckons with; workers ask the GPU itself."""
    machine_memory_gib: MemoryGib | None = None
    """Memory of one machine, in GiB; what needs more is refused. By default, `baton up` asks its own machine."""
    attention: AttentionSetting = AttentionSetting.AUTO
    """What computes attention; auto takes the fastest on the device, and the worker's log says which and why.
    torch, for any device, is the reference."""
    collectives: Collectives = Collectives.AUTO
    """How the ranks of a replica exchange tensors: in shared memory where they share a host, or always over TCP."""
    check_collectives: Annotated[bool, Field(strict=True)] = False
    """Compare every collective over its ranks before it runs, and name the first that differs; slow, for debugging."""
    fetch_timeout_s: PositiveSeconds = 14400.0
    """Longest wait for the machines of a replica to have the model's files, which they may have to download."""
    start_timeout_s: PositiveSeconds = 300.0
    """Longest wait for all replicas to be ready, from when their machines have the model's files; in a Ray cluster that
    is joined, longest wait for machines with room for them, too."""
    silence_s: PositiveSeconds = 10.0
    """Silence of a rank, the router or the bootstrap service after which it, with its replica, is started again."""
    step_timeout_s: Annotated[float, Field(ge=5, le=1_000_000, strict=True)] = 300.0
    """Longest time in which a rank's work loop may not turn, well above its longest step; then its process ends."""


class DeployConfig(Node):
    """The whole file."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] = "baton"
    """Name of the cluster: lower case letters, digits and dashes."""
    model: ModelConfig = ModelConfig()
    """Which model is served."""
    kv: KvConfig = KvConfig()
    """The page pool of each worker."""
    prefill: PrefillConfig = PrefillConfig()
    """The replicas that compute prompts."""
    decode: DecodeConfig = DecodeConfig()
    """The replicas that stream answers."""
    hicache: HicacheConfig = HicacheConfig()
    """Tiers below the device cache."""
    transfer: TransferConfig = TransferConfig()
    """How KV goes from prefill to decode."""
    router: RouterConfig = RouterConfig()
    """The HTTP endpoint."""
    resources: ResourcesConfig = ResourcesConfig()
    """What the cluster runs on."""
    log: LogConfig = LogConfig()
    """What processes write to standard error."""

    def verify_by(self) -> Verify:
        """What is checked of KV that was sent; see ``TransferConfig.verify``."""
        on_cpu = self.resources.device == "cpu"
        return self.transfer.verify or (Verify.DIGEST if on_cpu else Verify.COUNTS)

    def kv_memory_gib(self, pool: PoolConfig) -> float | None:
        """Memory of the page pool of one worker of these replicas, in GiB; None: what its GPU has left."""
        default = CPU_POOL_GIB if self.resources.device is Device.CPU else None
        return pool.kv_memory_gib or self.kv.memory_gib or default
