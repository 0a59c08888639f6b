"""lm-evaluation-harness: tasks that need generated text, and tasks that need log-probabilities of prompts."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.clients.demo import MODEL
from tests.clients.tool import run_tool

WORDS = ("tango", "zulu", "alpha", "delta")
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
"""
GENERATED = """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16}
metric_list: [{metric: exact_match}]
"""
CHOSEN = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{choices.index(answer)}}"
metric_list: [{metric: acc}]
"""


def check(url: str, tokenizer: Path) -> str:
    at = f"model={MODEL},base_url={url}/v1/completions,tokenizer={tokenizer},num_concurrent=2"
    model = ("--model", "local-completions", "--model_args", at, "--batch_size", "2")
    with TemporaryDirectory() as name:
        folder = Path(name)
        _write_tasks(folder)
        tasks = ("--tasks", "generated", "chosen", "--include_path", name, "--output_path", f"{folder / 'report'}")
        run_tool(folder, "lm_eval", "run", *model, *tasks, HF_HUB_OFFLINE="1", HF_HOME=name)
        (report,) = folder.joinpath("report").rglob("results_*.json")
        found: dict[str, Any] = json.loads(report.read_text())["results"]
    assert found["generated"]["exact_match,none"] == 1.0
    assert found["chosen"]["acc,none"] == 1.0
    return "a generation task and a multiple-choice task, all answers right"


def _write_tasks(folder: Path) -> None:
    """Write two tasks with the same questions."""
    choices = [f" {word} seven." for word in WORDS]
    docs = [{"question": f"The code is{right}\nThe code is", "answer": right, "choices": choices} for right in choices]
    questions = folder / "questions.jsonl"
    questions.write_text("\n".join(json.dumps(doc) for doc in docs))
    for name, form in (("generated", GENERATED), ("chosen", CHOSEN)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, questions=questions) + form)
