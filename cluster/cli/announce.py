"""Output of `baton up` once the cluster is up: the endpoint, the model, and a request to paste."""

import contextlib
import json
import shlex
import time

import httpx

from cluster.spec.config import DeployConfig
from cluster.spec.errors import BatonError

_POLL_S = 0.05


def wait_ready(url: str, timeout_s: float) -> None:
    """Wait until the router has a ready replica of each role.

    Raises:
        BatonError: the timeout expired.
    """
    deadline_s = time.monotonic() + timeout_s
    with httpx.Client(base_url=url, timeout=5.0, trust_env=False) as http:
        while True:
            with contextlib.suppress(httpx.TransportError):  # it may be shutting down again
                if http.get("/ready").is_success:
                    return
            if time.monotonic() >= deadline_s:
                raise BatonError(f"the router at {url} has no ready replicas after {timeout_s:g} s")
            time.sleep(_POLL_S)


def ready_text(url: str, config: DeployConfig) -> str:
    """Return the lines to print."""
    from workers.models.recall import DEMO_ANSWER, DEMO_PROMPT
    from workers.models.recall_weights import BUILT_IN

    model = config.model.name
    if config.model.path in BUILT_IN:
        body = {"model": model, "prompt": DEMO_PROMPT, "max_tokens": 16}
        request, answer = curl(f"{url}/v1/completions", body), f"\nThe answer is {DEMO_ANSWER!r}.\n"
    else:
        message = {"role": "user", "content": "What is a relay race? Answer in one sentence."}
        body = {"model": model, "messages": [message], "max_tokens": 64}
        request, answer = curl(f"{url}/v1/chat/completions", body), ""
    return (
        f"\nready   {url}/v1   model {model}\n\n{request}\n{answer}\nCtrl-C, or `baton down {config.name}`, stops it."
    )


def curl(url: str, body: object) -> str:
    """Return a POST request as a shell command."""
    header = shlex.quote("Content-Type: application/json")
    return f"curl -s {shlex.quote(url)} -H {header} -d {shlex.quote(json.dumps(body))}"
