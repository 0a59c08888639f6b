"""Models with random weights, made on the device, for measurements."""

import torch

from workers.engine.weights import allocate
from workers.models.decoder import DecoderModel
from workers.models.interface import DecoderConfig


def random_model(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> DecoderModel:
    """Build a model with random weights, equal in every process, and norms of one. Not packed yet.

    Products keep the scale of their inputs, so that attention is selective at any width.
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        model = DecoderModel(config, dtype=dtype, device=device)
    allocate(model, dtype, device)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        else:
            parameter.fill_(1)
    return model
