"""What the next draw of one request depends on besides its logits; lives where tokens are drawn."""

import math

import torch
from torch import Tensor

from cluster.spec.messages import Admit


class SamplingState:
    """One request's Sampling and, as far as that looks back, its tokens. Tensors are ``[vocab_size]``."""

    def __init__(self, admit: Admit, vocab_size: int, device: torch.device) -> None:
        self.sampling = admit.sampling
        self._tokens = list(admit.history)
        prompt, output = admit.history[: admit.prompt_len], admit.history[admit.prompt_len :]
        self.bias = self._make_bias(vocab_size, device)
        """fp32, added to the logits; -inf forbids. None adds nothing."""
        self.in_prompt: Tensor | None = None
        """bool; only where there are penalties."""
        self.output_counts: Tensor | None = None
        """fp32, how often each token is in the output; only where there are penalties."""
        if self.sampling.has_penalties:
            self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.in_prompt[torch.tensor(prompt, dtype=torch.int64, device=device)] = True
            counts = torch.bincount(torch.tensor(output, dtype=torch.int64, device=device), minlength=vocab_size)
            self.output_counts = counts.float()

    def banned(self, position: int) -> set[int]:
        """Tokens that cannot be drawn at this output position."""
        banned = set(self.sampling.ending_ids) if position < self.sampling.min_tokens else set()
        for word in self.sampling.bad_words:
            before = word[:-1]
            if not before or self._tokens[-len(before) :] == before:
                banned.add(word[-1])
        return banned

    def append(self, token_id: int) -> None:
        """A token was drawn."""
        if self.sampling.bad_words:
            self._tokens.append(token_id)
        if self.output_counts is not None:
            self.output_counts[token_id] += 1

    def _make_bias(self, vocab_size: int, device: torch.device) -> Tensor | None:
        row = self.sampling
        if not row.logit_bias and not row.allowed_ids:
            return None
        bias = torch.zeros(vocab_size, device=device)
        if row.allowed_ids:
            bias.fill_(-math.inf)
            bias[list(row.allowed_ids)] = 0.0
        bias[list(row.logit_bias)] += torch.tensor(list(row.logit_bias.values()), device=device)
        return bias
