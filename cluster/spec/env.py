"""Declarations of all environment variables that Baton reads. An invalid value prevents startup."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from cluster.spec.errors import UserError

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class EnvVar(Generic[Value]):
    """One environment variable; an empty value counts as unset."""

    name: str
    sentence: str
    allowed: str
    parse: Callable[[str], Value]
    """Parser of the text; raises ValueError if the text is not allowed."""
    default: Callable[[Mapping[str, str]], Value]
    """Value of an unset variable, computed from the environment."""
    show: Callable[[str], str] = repr
    """Function that formats an invalid value for the error message; secrets use one that hides the value."""
    may_be_empty: bool = True
    """True if an empty value counts as unset."""

    def get(self, environ: Mapping[str, str] | None = None) -> Value:
        """Return the variable's value in an environment, by default this process's own.

        Raises:
            UserError: the value is not allowed.
        """
        source = os.environ if environ is None else environ
        text = source.get(self.name, "")
        if not text and (self.may_be_empty or self.name not in source):
            return self.default(source)
        try:
            return self.parse(text)
        except ValueError as exc:
            raise UserError(f"{self.name}: got {self.show(text)}; allowed: {self.allowed}") from exc


_ALLOWED_FOLDER = "the absolute path of a folder"


def _absolute_folder(text: str) -> Path:
    # Unlike the methods of Path, these functions do not fail for unknown accounts and folders that may not be entered.
    folder = Path(os.path.expanduser(text))  # noqa: PTH111
    if not folder.is_absolute() or (os.path.exists(folder) and not folder.is_dir()):  # noqa: PTH110
        raise ValueError(text)
    return folder


def _default_cache(environ: Mapping[str, str]) -> Path:
    if (base := Path(environ.get("XDG_CACHE_HOME", ""))).is_absolute():  # its specification: ignore a relative path
        return base / "baton"
    try:
        return Path.home() / ".cache" / "baton"
    except RuntimeError as error:
        message = f"BATON_CACHE_DIR: not set, and this account has no home folder; allowed: {_ALLOWED_FOLDER}"
        raise UserError(message) from error


ALLOWED_TOKEN = "8 or more printable ASCII characters without a space"


def parse_token(text: str) -> str:
    """Return a key or token. Raises ValueError if it is not ``ALLOWED_TOKEN``."""
    if len(text) < 8 or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(text)
    return text


def _length(text: str) -> str:
    return f"{len(text)} characters"


CACHE_DIR = EnvVar(
    name="BATON_CACHE_DIR",
    sentence="Folder for logs, built checkpoints, compiled kernels and stored pages; by default `~/.cache/baton`.",
    allowed=_ALLOWED_FOLDER,
    parse=_absolute_folder,
    default=_default_cache,
)


def _secret(name: str, sentence: str) -> EnvVar[str | None]:
    return EnvVar(
        name=name,
        sentence=sentence,
        allowed=ALLOWED_TOKEN,
        parse=parse_token,
        default=lambda _environ: None,
        show=_length,
    )


TOKEN = _secret("BATON_TOKEN", "Bearer token of the bootstrap service; generated for each cluster by default.")
ADMIN_KEY = _secret("BATON_ADMIN_KEY", "Key of the router's `/admin` routes; without it they are disabled.")
API_KEY = _secret("BATON_API_KEY", "API key that `baton chat`, `bench` and `status` send to the endpoint.")
API_KEYS: EnvVar[tuple[str, ...]] = EnvVar(
    name="BATON_API_KEYS",
    sentence="API keys that the router accepts, besides those in `router.api_keys_file`.",
    allowed=f"keys of {ALLOWED_TOKEN}, joined by commas",
    parse=lambda text: tuple(parse_token(key.strip()) for key in text.split(",")),
    default=lambda _environ: (),
    show=_length,
    may_be_empty=False,  # without keys, every client is admitted
)
ALL: tuple[EnvVar[Any], ...] = (CACHE_DIR, TOKEN, ADMIN_KEY, API_KEY, API_KEYS)
_SECRETS = (TOKEN, ADMIN_KEY, API_KEY, API_KEYS)


def check_environ() -> None:
    """Raise UserError if a variable of this process has a value that is not allowed."""
    for variable in ALL:
        variable.get()


def take_secrets() -> dict[str, str]:
    """Remove the secrets from this process's environment, which later processes inherit; return them."""
    names = [secret.name for secret in _SECRETS if secret.name in os.environ]
    return {name: os.environ.pop(name) for name in names}
