"""The shape of the model that `baton bench cp` measures. Loads no torch."""

from dataclasses import dataclass

from cluster.spec.errors import UserError
from cluster.spec.kv import DTYPE_BYTES
from workers.models.interface import DecoderConfig
from workers.models.registry import parse_model_config

DTYPES = ("bfloat16", "float32")
MOST_LAYERS = 4096
"""More is a slip of the pen, and would be built for minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A Qwen3-like decoder with random weights."""

    num_layers: int = 8
    hidden_size: int = 512
    intermediate_size: int = 1536
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    vocab_size: int = 4096
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        sizes = {
            "layers": self.num_layers,
            "hidden-size": self.hidden_size,
            "heads": self.num_heads,
            "kv-heads": self.num_kv_heads,
            "head-dim": self.head_dim,
        }
        for name, value in sizes.items():
            if value < 1:
                raise UserError(f"--{name}: got {value}; allowed: 1 or more")
        if self.num_layers > MOST_LAYERS:
            raise UserError(f"--layers: got {self.num_layers}; allowed: at most {MOST_LAYERS}")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"--kv-heads: got {self.num_kv_heads}; allowed: a divisor of --heads {self.num_heads}")
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype: got {self.dtype!r}; allowed: {', '.join(DTYPES)}")

    @property
    def weight_bytes(self) -> int:
        """Of matrices, beside which nothing else counts."""
        heads_width = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        a_layer = self.hidden_size * (heads_width + 3 * self.intermediate_size)
        tables = 2 * self.vocab_size * self.hidden_size
        return (self.num_layers * a_layer + tables) * DTYPE_BYTES[self.dtype]

    def config(self, max_len: int) -> DecoderConfig:
        """The model's configuration; raises UnsupportedModelError when it cannot be."""
        raw = {
            "architectures": ["Qwen3ForCausalLM"],
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "dtype": self.dtype,
            "max_position_embeddings": max_len,
        }
        return parse_model_config(raw)
