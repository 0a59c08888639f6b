"""A random model's output follows its grammar through handoff and preemption, without an effect on other requests."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from cluster.spec.sampling import Sampling, Stopping
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.local_cluster import LocalCluster, Prompt, small_pool_cluster
from tests.fakes.local_engine import prompts_of
from tests.fakes.model_folder import EOS, VOCAB_SIZE, write_model_folder

pytestmark = pytest.mark.integration

"""Pool in which the prompts fill 27 pages, so that answers need more, and some requests are preempted."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
CODE = r"[A-F]{4}-[0-9]{8}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = write_model_folder(tmp_path_factory.mktemp("checkpoint"))
    make_checkpoint(folder, "qwen3", seed=11, vocab_size=VOCAB_SIZE)
    with small_pool_cluster(folder) as cluster:
        yield cluster


def asked(prompt: list[int], part: dict[str, Any], max_tokens: int = 80, **fields: Any) -> Prompt:
    sampling = Sampling(grammar=json.dumps({"grammars": [part]}), ending_ids=frozenset({EOS}), **fields)
    return Prompt(prompt, Stopping(max_tokens=max_tokens, stop_token_ids=frozenset({EOS})), sampling)


def text_of(token_ids: list[int]) -> str:
    return bytes(token_id for token_id in token_ids if token_id != EOS).decode()


def test_every_request_follows_its_grammar(cluster: LocalCluster) -> None:
    greedy, *sampled = prompts_of((90, 200, 33, 5, 64))
    schema, code = {"json_schema": SCHEMA}, {"lark_grammar": f"start: /{CODE}/"}
    prompts = [
        Prompt(greedy, Stopping(max_tokens=40)),
        asked(sampled[0], schema, num_logprobs=2),
        asked(sampled[1], schema, temperature=1.5, seed=3, frequency_penalty=0.5),
        asked(sampled[2], code, temperature=2.0, seed=4, min_tokens=3),
        asked(sampled[3], {"lark_grammar": 'start: "y"'}),
    ]
    together = cluster.answer(prompts, timeout_s=120)
    for answer in together[1:3]:
        jsonschema.validate(json.loads(text_of(answer.token_ids)), SCHEMA)
    assert re.fullmatch(CODE, text_of(together[3].token_ids))
    assert text_of(together[4].token_ids) == "y"
    assert len(together[1].logprobs) == len(together[1].token_ids)
    alone = [cluster.answer([prompt], timeout_s=120)[0] for prompt in prompts]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
