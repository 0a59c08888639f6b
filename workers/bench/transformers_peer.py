"""The transformers library on the engine's weights, for `baton bench engine`."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from workers.models.decoder import DecoderModel


class TransformersPeer:
    """A transformers model over the engine's tensors, so that no memory is needed for a second copy."""

    def __init__(self, raw: Mapping[str, Any], model: DecoderModel) -> None:
        """Wrap a model; ``raw`` is its config.json. Raises ImportError where transformers is not installed."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**raw)
        with torch.device("meta"):
            make: Any = AutoModelForCausalLM.from_config
            self._model = make(config, dtype=model.dtype, attn_implementation="sdpa")
        weights = {name: part.target for name, part in model.weights().items()}
        self._model.load_state_dict(weights, assign=True, strict=False)
        self._model.tie_weights()
        # Its frequencies come from the configuration, not from weights.
        with model.device:
            self._model.model.rotary_emb = type(self._model.model.rotary_emb)(config)
        missing = [name for name, parameter in self._model.named_parameters() if parameter.is_meta]
        assert not missing, f"not in our model: {missing}"
        self._model.eval()
        self._device = model.device

    def generate(self, prompt: Sequence[int], num_tokens: int) -> tuple[float, list[float], list[int]]:
        """Return the start, the time of each token and the tokens of the greedy answer.

        Raises:
            RuntimeError: there is not enough memory.
        """
        from transformers import DynamicCache

        start_s = time.perf_counter()
        tokens, times_s, cache = torch.tensor([list(prompt)], device=self._device), list[float](), DynamicCache()
        answer: list[int] = []
        with torch.inference_mode():
            for _ in range(num_tokens):
                out = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                tokens = out.logits[:, -1:].argmax(dim=-1)
                answer.append(int(tokens.item()))
                times_s.append(time.perf_counter())
        return start_s, times_s, answer
