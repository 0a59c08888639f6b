"""Memory of a rank while it loads: its part of the weights and one more tensor, for any file layout."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.fp8_checkpoints import to_fp8_blocks
from tests.readme import ROOT

pytestmark = pytest.mark.integration

MIB = 1 << 20
SLACK = 12 * MIB
"""Memory of Python and torch in addition to tensors."""
SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_shard_size": "40MB",
}


class Loading(NamedTuple):
    """Sizes in bytes on one rank."""

    most: int
    """Peak of anonymous memory, without the initial value."""
    share: int
    largest: int
    """Size of the largest tensor."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return checkpoints of about 200 MiB in several files."""
    root = tmp_path_factory.mktemp("models")
    folders = {
        "llama": make_checkpoint(root / "llama", "llama", intermediate_size=4096, num_hidden_layers=2, **SIZES),
        "qwen3_moe": make_checkpoint(
            root / "qwen3_moe", "qwen3_moe", num_experts=16, moe_intermediate_size=512, num_hidden_layers=1, **SIZES
        ),
    }
    fp8 = make_checkpoint(root / "fp8", "llama", intermediate_size=4096, num_hidden_layers=2, **SIZES)
    folders["llama in FP8"] = to_fp8_blocks(fp8, (128, 128), num_files=4)
    for folder in folders.values():
        assert len(list(folder.glob("*.safetensors"))) > 3
    return folders


def load(folder: Path, axes: dict[str, int], *, dtype: str = "float32", reads_whole_files: bool = False) -> Loading:
    """Load the last rank's part in a separate process, and watch its memory."""
    size = axes.get("tp", 1) * axes.get("pp", 1)
    arguments = {"folder": str(folder), "axes": axes, "global_rank": size - 1, "dtype": dtype}
    command = [sys.executable, "-m", "tests.fakes.loading_rank"]
    with subprocess.Popen(
        [*command, json.dumps({**arguments, "reads_whole_files": reads_whole_files})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        before, seen, is_over = anonymous_bytes(process.pid), [0], threading.Event()

        def watch() -> None:
            while not is_over.wait(0.001):
                seen.append(anonymous_bytes(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            process.stdin.write("\n")
            process.stdin.flush()
            share, largest = map(int, process.stdout.readline().split())
            seen.append(anonymous_bytes(process.pid))
        finally:
            is_over.set()
            watcher.join()
            process.stdin.close()
    return Loading(max(seen) - before, share, largest)


def anonymous_bytes(pid: int) -> int:
    """Return a process's memory that is not backed by a file."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("family", "axes", "dtype"),
    [
        pytest.param("llama", {"tp": 4}, "float32", marks=pytest.mark.full),
        ("llama", {"tp": 4}, "bfloat16"),
        ("llama", {"pp": 2}, "float32"),
        ("qwen3_moe", {"tp": 4, "ep": 4}, "float32"),
        ("llama in FP8", {"tp": 4}, "bfloat16"),
        pytest.param("qwen3_moe", {"tp": 4, "ep": 2}, "float32", marks=pytest.mark.full),
    ],
)
def test_a_rank_takes_its_share_and_one_tensor(
    folders: dict[str, Path], family: str, axes: dict[str, int], dtype: str
) -> None:
    loading = load(folders[family], axes, dtype=dtype)
    size = 2 if "pp" in axes else 4
    whole = stored_bytes(folders[family.removesuffix(" in FP8")]) // (2 if dtype == "bfloat16" else 1)
    assert loading.share < 1.1 * whole / size
    assert loading.share * 0.9 < loading.most < loading.share + loading.largest + SLACK


def test_whole_files_in_memory_are_detected(folders: dict[str, Path]) -> None:
    loading = load(folders["llama"], {"tp": 4}, reads_whole_files=True)
    assert loading.most > loading.share + loading.largest + SLACK
