"""A message between a router and real workers is lost once: the answer is whole, soon, and nothing is left."""

import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from cluster.channel import Outbox
from cluster.spec.config import DeployConfig, KvConfig, ModelConfig, RouterConfig
from cluster.spec.messages import Cancel, Message, Outputs, Submit
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.held_engine import HeldEngine
from tests.fakes.model_folder import write_model_folder

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SOON_S = 30.0
"""A hundredth of what a request may take."""
BODY = {
    "model": "m",
    "prompt": [5, 6, 7],
    "max_tokens": 5,
    "ignore_eos": True,
    "temperature": 0,
    "return_token_ids": True,
}

IsLost = Callable[[str, Message], bool]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HeldEngine, httpx.Client]]:
    folder = make_checkpoint(write_model_folder(tmp_path_factory.mktemp("model")), "llama")
    config = DeployConfig(
        model=ModelConfig(path=str(folder), served_name="m"),
        kv=KvConfig(page_size=16, memory_gib=2**-9),
        router=RouterConfig(port=0),
    )
    with HeldEngine(config, folder).running() as engine, engine.served(config, folder) as http:
        yield engine, http


def is_last_output(_to: str, message: Message) -> bool:
    outputs = message.outputs if isinstance(message, Outputs) else []
    return any(output.finish is not None for output in outputs)


def is_for_decode(to: str, message: Message) -> bool:
    return isinstance(message, Submit) and to == message.decode.address


def is_cancel(_to: str, message: Message) -> bool:
    return isinstance(message, Cancel)


@pytest.mark.parametrize("kinds", [[is_last_output], [is_for_decode], [is_for_decode, is_cancel]])
def test_the_answer_is_the_same_as_ever(
    served: tuple[HeldEngine, httpx.Client], kinds: list[IsLost], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, http = served
    expected = complete(http)
    left, real = list(kinds), Outbox.send

    def send(outbox: Outbox, to: str, message: Message) -> None:
        if any(is_lost(to, message) for is_lost in left[:1]):
            del left[0]
        else:
            real(outbox, to, message)

    monkeypatch.setattr(Outbox, "send", send)
    start_s = time.monotonic()
    assert complete(http) == expected
    assert time.monotonic() - start_s < SOON_S
    while engine.leftovers:
        assert time.monotonic() - start_s < 2 * SOON_S, engine.leftovers
        time.sleep(0.05)
    assert left == []


def complete(http: httpx.Client) -> list[int]:
    reply = http.post("/v1/completions", json=BODY)
    assert reply.status_code == 200, reply.text
    token_ids: list[int] = reply.json()["choices"][0]["token_ids"]
    assert len(token_ids) == BODY["max_tokens"]
    return token_ids
