"""The DP rank that a client wants its request computed on."""

from starlette.requests import Request

from cluster.spec.config import DeployConfig
from router.api.errors import bad_request

_HEADER = "X-data-parallel-rank"


def dp_rank_of(request: Request, config: DeployConfig) -> int | None:
    """``X-data-parallel-rank``, for each side that has such a rank; None where it is not given.

    Raises:
        ApiError: 400 for what is no rank of either side.
    """
    given = request.headers.get(_HEADER)
    if given is None:
        return None
    most = max(config.prefill.parallel.dp, config.decode.parallel.dp)
    if not given.isascii() or not given.isdigit() or int(given) >= most:
        raise bad_request(f"{_HEADER}: got {given!r}; allowed: 0 to {most - 1}", _HEADER)
    return int(given)
