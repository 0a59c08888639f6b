"""Every case of `baton bench kernels` runs, and the work it is said to do is what it must do."""

import torch

from workers.kernel_cases import Sizes, kernel_cases
from workers.kernel_result import HeadShape, Limit

SHAPE = HeadShape(heads=4, kv_heads=2, head_dim=16, hidden=32, inner=48)
SIZES = Sizes(prompt_len=70, prefix_len=100, chunk_len=10, decode_len=130, decode_kv_bytes=130 * 2 * 2 * 16 * 2 * 3)


def test_every_case_runs() -> None:
    torch.manual_seed(0)
    works = {}
    for case in kernel_cases(SHAPE, SIZES, torch.device("cpu")):
        case.run()
        works[case.kernel] = (case.limit, case.work)
        if case.peer is not None:
            case.peer()
    assert works == {
        "prefill 70": (Limit.FLOPS, 4 * 4 * 16 * 70 * 71 / 2),
        "prefill 10 behind 100": (Limit.FLOPS, 4 * 4 * 16 * (10 * 100 + 10 * 11 / 2)),
        "decode 3 x 130": (Limit.BYTES, 3 * 130 * 2 * 2 * 16 * 2),
        "merge 4 partials": (Limit.BYTES, 5 * 70 * 4 * (16 * 2 + 4)),
        "rotate": (Limit.BYTES, 2 * 70 * 4 * 16 * 2),
        "normalise a sum": (Limit.BYTES, 4 * 70 * 32 * 2),
        "gate": (Limit.BYTES, 3 * 70 * 48 * 2),
        "store K and V": (Limit.BYTES, 2 * 70 * 2 * 2 * 16 * 2),
        "gather pages": (Limit.BYTES, 2 * 2 * 64 * 2 * 2 * 16 * 2),
    }
