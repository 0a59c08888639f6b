"""Writer of the recall checkpoints: built-in models whose answers can be computed by hand, for demos and tests.

`python -m workers.models.recall FOLDER` builds it. Imports no torch.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from cluster.spec.errors import UserError
from workers.models import recall_tokenizer, recall_weights

DEMO_PROMPT = "The launch code is tango seven.\nThe launch code is"
DEMO_ANSWER = " tango seven."
"""Answer to DEMO_PROMPT, as a chat message or as plain text, before the model stops by itself."""

VERSION = 1
"""Version of the files, raised whenever one changes, so that older checkpoints are rebuilt."""
VERSION_KEY = "recall_version"


def build_recall_checkpoint(folder: Path, *, has_experts: bool = False) -> None:
    """Write a checkpoint to `folder`, all or nothing, unless it is there already.

    Raises UserError when `folder` exists and holds something else.
    """
    built = _built_version(folder, has_experts)
    if built == VERSION:
        return
    if folder.exists() and built is None and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not a recall checkpoint; allowed: an empty or new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        fresh = Path(scratch, "fresh")
        _write_files(fresh, has_experts)
        _swap_in(fresh, folder, discarded=Path(scratch, "old"), has_experts=has_experts)


def _built_version(folder: Path, has_experts: bool) -> int | None:
    """Return the version of the recall checkpoint of this kind in `folder`; None if there is none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        version, is_kind = config[VERSION_KEY], ("num_local_experts" in config) == has_experts
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return version if is_kind and isinstance(version, int) else None


def _write_files(folder: Path, has_experts: bool) -> None:
    folder.mkdir()
    eos = {"eos_token_id": list(recall_tokenizer.EOS_TOKEN_IDS), "bos_token_id": recall_weights.BEGIN_ID}
    _write_json(folder / "config.json", {**recall_weights.config(has_experts=has_experts), **eos, VERSION_KEY: VERSION})
    _write_json(folder / "generation_config.json", {**eos, "do_sample": False})
    _write_json(folder / "tokenizer_config.json", recall_tokenizer.tokenizer_config())
    recall_tokenizer.build_tokenizer().save(str(folder / "tokenizer.json"))
    save_file(recall_weights.tensors(has_experts=has_experts), folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _swap_in(fresh: Path, folder: Path, discarded: Path, has_experts: bool) -> None:
    """Replace `folder` with `fresh`, unless another process has finished the same build first."""
    if folder.exists():
        folder.rename(discarded)
    try:
        fresh.rename(folder)
    except OSError:
        if _built_version(folder, has_experts) != VERSION:
            raise


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m workers.models.recall FOLDER", file=sys.stderr)
        return 2
    build_recall_checkpoint(Path(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
