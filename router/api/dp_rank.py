"""The DP rank that a client wants its request computed on."""

from starlette.requests import Request

from cluster.spec.config import DeployConfig
from router.api.errors import bad_request
from router.api.requests import GenerationRequest

_HEADER = "X-data-parallel-rank"
_FIELDS = ("routed_dp_rank", "data_parallel_rank")
"""SGLang's, the second for clients of its earlier releases."""


def dp_rank_of(request: Request, config: DeployConfig, body: GenerationRequest) -> int | None:
    """``X-data-parallel-rank``, else a field of the body; None where none is given.

    It is meant for both sides. Where one has fewer DP ranks and none of this number, its ``dp_policy`` chooses there.

    Raises:
        ApiError: 400 for what is no rank of either side.
    """
    fields = {name: getattr(body, name) for name in _FIELDS}
    most = max(config.prefill.parallel.dp, config.decode.parallel.dp)
    for name, given in {_HEADER: request.headers.get(_HEADER), **fields}.items():
        if given is None:
            continue
        text = str(given)
        if not text.isascii() or not text.isdigit() or int(text) >= most:
            raise bad_request(f"{name}: got {given!r}; allowed: 0 to {most - 1}", name)
        return int(text)
    return None
