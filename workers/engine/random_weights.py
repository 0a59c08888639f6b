"""A model that nobody trained, made where it computes: for measurements, which do not care what it says."""

import torch

from workers.engine.weights import allocate
from workers.models.config import ModelConfig
from workers.models.decoder import DecoderModel


def random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DecoderModel:
    """Equal in every process: weights from one seed, norms of one. Not packed yet.

    Products keep the scale of what goes in, so that attention singles tokens out at any width.
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
