"""The DP rank that a client wants its request computed on."""

from starlette.requests import Request

from cluster.spec.config import DeployConfig
from router.api.errors import bad_request
from router.api.headers import header
from router.api.requests import GenerationRequest

_HEADER = "X-data-parallel-rank"


def dp_rank_of(request: Request, config: DeployConfig, body: GenerationRequest) -> int | None:
    """``X-data-parallel-rank``, else SGLang's field, or that of its earlier releases; None where none is given.

    It is meant for both sides. Where one has fewer DP ranks and none of this number, its ``dp_policy`` chooses there.

    Raises:
        ApiError: 400 for what is no rank of either side.
    """
    named = header(request.scope, _HEADER.lower().encode())
    given_by = {_HEADER: named, "routed_dp_rank": body.routed_dp_rank, "data_parallel_rank": body.data_parallel_rank}
    for name, given in given_by.items():
        if given is None:
            continue
        most = max(config.prefill.parallel.dp, config.decode.parallel.dp)
        text = str(given)
        if not text.isascii() or not text.isdigit() or int(text) >= most:
            raise bad_request(f"{name}: got {given!r}; allowed: 0 to {most - 1}", name)
        return int(text)
    return None
