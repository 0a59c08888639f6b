"""Time of the attention backends on this machine's CPU. `baton doctor` runs this file and shows the line it prints."""

import torch

from cluster.spec.config import AttentionSetting, Device
from workers.attention.interface import AttentionParams, AttentionShape
from workers.attention.registry import choose_backend
from workers.device import open_device

SHAPE = AttentionShape(num_heads=8, num_kv_heads=2, query_dim=128, value_dim=128, params=AttentionParams(scale=0.09))
"""Shape of one of four TP ranks of an 8B model."""


def main() -> None:
    torch.set_num_threads(1)
    choice = choose_backend(AttentionSetting.AUTO, open_device(Device.CPU), torch.bfloat16, shape=SHAPE)
    print(f"{choice.name}; {choice.reason}")


if __name__ == "__main__":
    main()
