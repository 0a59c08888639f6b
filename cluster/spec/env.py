"""Every environment variable Baton reads, declared once: name, type, default, sentence. An invalid value stops the
start.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from cluster.spec.errors import UserError

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class EnvVar(Generic[Value]):
    """One variable; an empty value counts as unset."""

    name: str
    sentence: str
    """Description of the effect."""
    allowed: str
    """Allowed values, in words."""
    parse: Callable[[str], Value]
    """Parser of the text; raises ValueError for a text that is not allowed."""
    default: Callable[[Mapping[str, str]], Value]
    """Function from the rest of the environment to the value when the variable is unset."""
    show: Callable[[str], str] = repr
    """Formatter of an invalid text in an error; hides secrets."""

    def get(self, environ: Mapping[str, str] | None = None) -> Value:
        """Return the value in an environment, by default that of this process.

        Raises:
            UserError: the value is not allowed.
        """
        source = os.environ if environ is None else environ
        text = source.get(self.name, "")
        if not text:
            return self.default(source)
        try:
            return self.parse(text)
        except (ValueError, KeyError) as exc:
            raise UserError(f"{self.name}: got {self.show(text)}; allowed: {self.allowed}") from exc


def _absolute_folder(text: str) -> Path:
    folder = Path(text).expanduser()
    if not folder.is_absolute() or (folder.exists() and not folder.is_dir()):
        raise ValueError(text)
    return folder


def _default_cache(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "baton"


def _token(text: str) -> str:
    if len(text) < 8 or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(text)
    return text


CACHE_DIR = EnvVar(
    name="BATON_CACHE_DIR",
    sentence="Folder of built checkpoints and compiled kernels.",
    allowed="the absolute path of a folder",
    parse=_absolute_folder,
    default=_default_cache,
)
TOKEN: EnvVar[str | None] = EnvVar(
    name="BATON_TOKEN",
    sentence="Bearer token of the bootstrap service; generated for each cluster by default.",
    allowed="8 or more printable ASCII characters without a space",
    parse=_token,
    default=lambda _environ: None,
    show=lambda text: f"{len(text)} characters",
)
ADMIN_KEY: EnvVar[str | None] = EnvVar(
    name="BATON_ADMIN_KEY",
    sentence="Key of the router's `/admin` routes; without it they are disabled.",
    allowed="8 or more printable ASCII characters without a space",
    parse=_token,
    default=lambda _environ: None,
    show=lambda text: f"{len(text)} characters",
)
API_KEY: EnvVar[str | None] = EnvVar(
    name="BATON_API_KEY",
    sentence="API key that `baton chat` and `baton bench` send to the endpoint.",
    allowed="8 or more printable ASCII characters without a space",
    parse=_token,
    default=lambda _environ: None,
    show=lambda text: f"{len(text)} characters",
)
API_KEYS: EnvVar[tuple[str, ...]] = EnvVar(
    name="BATON_API_KEYS",
    sentence="API keys that the router accepts, besides those in `router.api_keys_file`.",
    allowed="keys of 8 or more printable ASCII characters without a space, joined by commas",
    parse=lambda text: tuple(_token(key.strip()) for key in text.split(",")),
    default=lambda _environ: (),
    show=lambda text: f"{len(text)} characters",
)
ALL: tuple[EnvVar[Path] | EnvVar[str | None] | EnvVar[tuple[str, ...]], ...] = (
    CACHE_DIR,
    TOKEN,
    ADMIN_KEY,
    API_KEY,
    API_KEYS,
)
