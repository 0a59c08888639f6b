"""Structured output of the recall models ends where the prompt has no JSON to repeat."""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from cluster.grammar import Grammars
from cluster.spec.sampling import Sampling
from router.message import Thinking
from router.preprocess.constrain import ANY_OBJECT, Constraint, json_part
from workers.engine.logits_processors import GrammarState
from workers.models.recall import DEMO_PROMPT, EOS_TOKEN_IDS, build_recall_checkpoint
from workers.models.recall_weights import Variant

GREEDY, SEEDS = -1, range(20)
MAX_TOKENS = 256
MIN_SHARE = 0.98
"""Minimum share of sampled answers that are valid."""
TEXT, INTEGER, NUMBER, BOOLEAN = ({"type": name} for name in ("string", "integer", "number", "boolean"))
TEXTS, INTEGERS = {"type": "array", "items": TEXT}, {"type": "array", "items": INTEGER}


def closed(**properties: Any) -> dict[str, Any]:
    return {**opened(**properties), "additionalProperties": False}


def opened(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


SCHEMAS: dict[str, Any] = {
    "open": opened(city=TEXT, age=INTEGER),
    "closed": closed(city=TEXT, age=INTEGER),
    "numbers": closed(a=INTEGER, b=NUMBER, c=NUMBER, d=INTEGER),
    "booleans": closed(ok=BOOLEAN, done=BOOLEAN, name=TEXT),
    "texts": closed(tags=TEXTS),
    "integers": closed(values=INTEGERS),
    "enums": closed(color={"enum": ["red", "green", "blue"]}, size={"type": "string", "enum": ["small", "large"]}),
    "nested": closed(person=closed(name=TEXT, home=closed(street=TEXT, zip=INTEGER)), tags=TEXTS),
    "nested and open": opened(person=opened(name=TEXT, home=opened(street=TEXT, zip=INTEGER)), tags=TEXTS),
    "objects": closed(people={"type": "array", "items": closed(name=TEXT, age=INTEGER), "minItems": 2}),
    "optional": {"type": "object", "properties": {"a": TEXT, "b": INTEGER}},
    "any object": dict(ANY_OBJECT),
}
FUNCTIONS: dict[str, Any] = {
    "now": {"type": "object", "properties": {}},
    "weather": {"type": "object", "properties": {"city": TEXT, "unit": {"enum": ["C", "F"]}}, "required": ["city"]},
    "add": closed(a=NUMBER, b=NUMBER),
}
DESCRIPTION = "Return what is asked for."
PROMPTS = (
    "Where does Ada live?",
    DEMO_PROMPT,
    "Ada Lovelace is 36 years old, and lives in London with the cat and the dog. Answer with a JSON object.",
)


class Speaker:
    """A recall model with its grammars."""

    def __init__(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert isinstance(model, PreTrainedModel)
        self._model = model
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert isinstance(tokenizer, PreTrainedTokenizerBase)
        self._tokenizer = tokenizer
        self._vocab_size: int = model.config.vocab_size
        self.grammars = Grammars(folder, self._vocab_size)

    def valid(self, prompt: str, schema: Any, seeds: Sequence[int], tools: Sequence[Any] = ()) -> list[bool]:
        """Return whether the answer of each seed ends and follows the schema."""
        turns = [{"role": "user", "content": prompt}]
        template: Any = self._tokenizer.apply_chat_template
        prompt_ids = template(turns, tools=[*tools], add_generation_prompt=True, return_dict=False)
        return [ended and _follows(text, schema) for text, ended in self._answers(prompt_ids, schema, seeds)]

    @torch.inference_mode()
    def _answers(self, prompt_ids: list[int], schema: Any, seeds: Sequence[int]) -> list[tuple[str, bool]]:
        draws = [torch.Generator().manual_seed(max(seed, 0)) for seed in seeds]
        states = [self._state(schema) for _ in seeds]
        answers: list[list[int]] = [[] for _ in seeds]
        ended, cache = [False] * len(seeds), DynamicCache(config=self._model.config)
        step = torch.tensor([prompt_ids] * len(seeds))
        for position in range(MAX_TOKENS):
            logits = self._model(step, past_key_values=cache, use_cache=True).logits[:, -1]
            step = torch.full((len(seeds), 1), EOS_TOKEN_IDS[0])
            for row, state in enumerate(states):
                if ended[row]:
                    continue
                masked = logits[row].masked_fill(~torch.from_numpy(state.allowed(position)), -torch.inf)
                token = _chosen(masked, draws[row], is_greedy=seeds[row] == GREEDY)
                if token not in EOS_TOKEN_IDS:
                    answers[row].append(token)
                    state.append(token)
                    step[row] = token
                ended[row] = token in EOS_TOKEN_IDS or state.is_over
            if all(ended):
                break
        return [(str(self._tokenizer.decode(ids)), over) for ids, over in zip(answers, ended, strict=True)]

    def _state(self, schema: Any) -> GrammarState:
        part = json_part(schema, "response_format")
        grammar = Constraint(rules=(), starts=("@answer",), parts={"answer": part}).grammar(Thinking.NONE, frozenset())
        sampling = Sampling(grammar=grammar, ending_ids=frozenset(EOS_TOKEN_IDS))
        return GrammarState(self.grammars, sampling, [], self._vocab_size)


def _chosen(logits: torch.Tensor, draw: torch.Generator, *, is_greedy: bool) -> int:
    return int(logits.argmax() if is_greedy else torch.multinomial(logits.softmax(-1), 1, generator=draw))


def _follows(text: str, schema: Any) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@pytest.fixture(scope="module")
def speaker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    folder = tmp_path_factory.mktemp("recall") / request.param
    build_recall_checkpoint(folder, variant=request.param)
    speaker = Speaker(folder)
    yield speaker
    speaker.grammars.close()


def every_speaker(*cases: Any) -> pytest.MarkDecorator:
    """Return all pairs of a speaker and a case; outside the full matrix, one speaker of each case."""
    pairs = [
        pytest.param(variant, case, marks=() if number == place % len(Variant) else pytest.mark.full)
        for number, variant in enumerate(Variant)
        for place, case in enumerate(cases)
    ]
    return pytest.mark.parametrize(("speaker", "case"), pairs, indirect=["speaker"])


@every_speaker(*PROMPTS)
def test_answers_in_json_end(speaker: Speaker, case: str) -> None:
    answers = {name: speaker.valid(case, schema, [GREEDY, *SEEDS]) for name, schema in SCHEMAS.items()}
    assert [name for name, (greedy, *_) in answers.items() if not greedy] == []
    shares = {name: sum(sampled) / len(sampled) for name, (_, *sampled) in answers.items()}
    assert sum(shares.values()) / len(shares) >= MIN_SHARE, shares


@every_speaker(*itertools.product(PROMPTS, (None, DESCRIPTION)))
def test_calls_of_functions_end(speaker: Speaker, case: tuple[str, str | None]) -> None:
    prompt, description = case
    shares = {}
    for name, parameters in FUNCTIONS.items():
        function = {"name": name, "description": description, "parameters": parameters}
        call = closed(name={"const": name}, parameters=parameters)
        tools = [{"type": "function", "function": function}]
        greedy, *sampled = speaker.valid(prompt, call, [GREEDY, *SEEDS], tools)
        assert greedy, name
        shares[name] = sum(sampled) / len(sampled)
    assert sum(shares.values()) / len(shares) >= MIN_SHARE, shares
