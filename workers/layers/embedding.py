"""Token embedding, and the way back from hidden states to the vocabulary."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Embedding(nn.Module):
    """A table [vocab_size, hidden_size], read by token id, or multiplied with to score every token."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.weight)

    def scores(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size], in the dtype of the table."""
        return functional.linear(hidden, self.weight)
