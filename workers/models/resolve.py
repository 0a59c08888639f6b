"""From what the user calls a model to a folder on this machine. No torch."""

from collections.abc import Sequence
from pathlib import Path

from cluster.spec.env import CACHE_DIR
from cluster.spec.errors import UserError
from workers.models.recall import VERSION, build_recall_checkpoint
from workers.models.recall_weights import BUILT_IN

DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt")
"""All but the weights."""
EVERYTHING = (*DESCRIPTION, "*.safetensors")


def resolve_model(path: str, files: Sequence[str] = EVERYTHING) -> Path:
    """The folder of a model: a built-in one is built once, a folder is taken as it is, a repository is downloaded.

    Args:
        path: What the user calls it.
        files: Patterns of what is needed of a repository; whoever only reads text needs no weights.

    Raises:
        UserError: it is none of these, or cannot be fetched.
    """
    if path in BUILT_IN:
        folder = CACHE_DIR.get() / f"{path}-{VERSION}"
        build_recall_checkpoint(folder, has_experts=BUILT_IN[path])
        return folder
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise UserError(
            f"model {path!r} is no folder on this machine; "
            f"allowed: a folder, a Hugging Face repository like 'owner/name', {' or '.join(BUILT_IN)}"
        )
    return _download(path, files)


def _download(repository: str, files: Sequence[str]) -> Path:
    # Imported late: a local folder needs neither the library nor the time it takes to import.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=list(files)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"model {repository!r} is no local folder and cannot be fetched from Hugging Face ({reason})"
        ) from error
