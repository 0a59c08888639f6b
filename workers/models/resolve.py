"""Location of a model's files on this machine. Loads no torch."""

from collections.abc import Sequence
from pathlib import Path

from cluster.spec.env import CACHE_DIR
from cluster.spec.errors import UserError
from workers.models.recall import VERSION, build_recall_checkpoint
from workers.models.recall_weights import BUILT_IN

DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt")
"""Files of a repository without its weights."""
EVERYTHING = (*DESCRIPTION, "*.safetensors")


def resolve_model(path: str, files: Sequence[str] = EVERYTHING) -> Path:
    """Return a model's folder, after building a built-in model or downloading a repository.

    Args:
        path: A built-in model's name, a folder or a Hugging Face repository.
        files: Patterns of the files to download.

    Raises:
        UserError: the path is none of these, or the repository cannot be fetched.
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
            f"model {path!r} is not a folder on this machine; "
            f"allowed: a folder, a Hugging Face repository like 'owner/name', {' or '.join(BUILT_IN)}"
        )
    return _download(path, files)


def _download(repository: str, files: Sequence[str]) -> Path:
    # A local folder does not need the library, which is slow to import.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=list(files)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"model {repository!r} is not a local folder and cannot be fetched from Hugging Face ({reason})"
        ) from error
