"""From what the user calls a model to a folder on this machine. No torch."""

from pathlib import Path

from cluster.spec.env import CACHE_DIR
from cluster.spec.errors import UserError
from workers.models.recall import VERSION, build_recall_checkpoint
from workers.models.recall_weights import BUILT_IN

DOWNLOADED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def resolve_model(path: str) -> Path:
    """The folder of a model: a built-in one is built once, a folder is taken as it is, a repository is downloaded.

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
    return _download(path)


def _download(repository: str) -> Path:
    # Imported late: a local folder needs neither the library nor the time it takes to import.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=list(DOWNLOADED)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"model {repository!r} is no local folder and cannot be fetched from Hugging Face ({reason})"
        ) from error
