"""transformers beside the engine, on the same weights, for `baton bench engine`."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from workers.engine_result import Timed
from workers.models.decoder import DecoderModel


class TransformersPeer:
    """Its model over our tensors, so that no memory is needed for a second copy."""

    def __init__(self, raw: Mapping[str, Any], model: DecoderModel) -> None:
        """``raw`` is what config.json holds; ImportError where transformers is not installed."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**raw)
        with torch.device("meta"):
            make: Any = AutoModelForCausalLM.from_config
            self._model = make(config, dtype=model.dtype, attn_implementation="sdpa")
        weights = {name: part.target for name, part in model.weights().items()}
        self._model.load_state_dict(weights, assign=True, strict=False)
        self._model.tie_weights()
        # Made from the configuration, not from weights.
        with model.device:
            self._model.model.rotary_emb = type(self._model.model.rotary_emb)(config)
        missing = [name for name, parameter in self._model.named_parameters() if parameter.is_meta]
        assert not missing, f"not in our model: {missing}"
        self._model.eval()
        self._device = model.device

    def generate(self, prompt: Sequence[int], num_tokens: int) -> Timed:
        """The greedy answer; logits of the last token alone, as the engine computes them.

        Raises:
            RuntimeError: no memory for it.
        """
        from transformers import DynamicCache

        start_s = time.perf_counter()
        tokens, times, cache = torch.tensor([list(prompt)], device=self._device), [], DynamicCache()
        answer: list[int] = []
        with torch.inference_mode():
            for _ in range(num_tokens):
                out = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                tokens = out.logits[:, -1:].argmax(dim=-1)
                answer.append(int(tokens.item()))
                times.append(time.perf_counter())
        return Timed.of(start_s, times, answer)
