"""The key that `baton chat` and `baton bench` ask with."""

from collections.abc import Mapping

from cluster.spec.env import API_KEY


def key_headers(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Headers of requests to an endpoint: the key of the environment, if there is one.

    Raises:
        UserError: it cannot be a key.
    """
    key = API_KEY.get(environ)
    return {"authorization": f"Bearer {key}"} if key is not None else {}
