"""Import rules: the contracts of .importlinter, and the modules that a fresh process really loads."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

from tests.fakes.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[2]
PACKAGES = ("cluster", "workers", "transfer", "router")
ON_GPUS = (
    "workers.kernels.",
    "workers.bench.kernels",
    "workers.bench.fp8_kernels",
    "workers.bench.latent_kernels",
    "workers.attention.triton.",
    "workers.attention.flash_attn",
)
MOONCAKE_STORE = "workers.hicache.storage.mooncake_store"
USES_TORCH_DISTRIBUTED = ("workers/parallel/", "workers/context_parallel/")

LOADED = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(set(sys.modules) & {heavy})))
"""

AFTER_LOADING = """
import json, sys
from pathlib import Path
from workers.engine.weights import load_model
load_model(Path(sys.argv[1]))
print(json.dumps(sorted(set(sys.modules) & {"sympy", "transformers"})))
"""


def modules_under(package: str) -> list[str]:
    """Return every module of a package by dotted name, except scripts that run on import."""
    files = sorted((ROOT / package).rglob("*.py"))
    names = (file.relative_to(ROOT).with_suffix("").parts for file in files if file.name != "__main__.py")
    return [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in names]


def heavy_modules_loaded(modules: list[str], heavy: set[str]) -> str:
    """Return the heavy modules that a fresh process has loaded after importing some modules, as a JSON list."""
    return printed_by(LOADED.format(heavy=heavy), *modules)


def printed_by(script: str, *arguments: str) -> str:
    """Return the output of a fresh process."""
    command = [sys.executable, "-c", script, *arguments]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_import_contracts_hold(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("logging.config.dictConfig", lambda _: None)  # it would silence our loggers
    status = lint_imports(config_filename=str(ROOT / ".importlinter"), no_cache=True)
    assert status == 0, capsys.readouterr().out


def test_control_processes_load_neither_torch_nor_ray() -> None:
    packages = ("router", *(f"cluster/{name}" for name in ("bootstrap", "cli", "planner", "simulator", "spec")))
    modules = [name for package in packages for name in modules_under(package)]
    assert heavy_modules_loaded(modules, {"torch", "ray", "transformers"}) == "[]"


def test_command_line_loads_nothing_heavy() -> None:
    heavy = {"torch", "ray", "transformers", "numpy", "fastapi", "uvicorn", "huggingface_hub", "zmq"}
    assert heavy_modules_loaded(["cluster.cli.app", "cluster.cli.main"], heavy) == "[]"


def test_workers_on_a_cpu_load_no_gpu_library() -> None:
    modules = [name for name in modules_under("workers") if not name.startswith((*ON_GPUS, MOONCAKE_STORE))]
    assert heavy_modules_loaded(modules, {"triton", "flash_attn"}) == "[]"


@pytest.mark.mooncake
def test_the_mooncake_store_loads_no_gpu_library() -> None:
    assert heavy_modules_loaded([MOONCAKE_STORE], {"triton", "flash_attn"}) == "[]"


def test_torch_distributed_stays_in_its_two_packages() -> None:
    """The import linter sees only top-level names of other libraries."""
    strangers = [
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        if not str(file.relative_to(ROOT)).startswith(USES_TORCH_DISTRIBUTED) and _uses_torch_distributed(file)
    ]
    assert strangers == []


def test_ancestor_packages_stay_empty() -> None:
    filled = [
        str(file) for package in PACKAGES for file in (ROOT / package).rglob("__init__.py") if file.stat().st_size
    ]
    assert filled == []


def _uses_torch_distributed(file: Path) -> bool:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names) if any(name.name.startswith("torch.distributed") for name in names):
                return True
            case ast.ImportFrom(module=str(module)) if module.startswith("torch.distributed"):
                return True
            case ast.ImportFrom(module="torch", names=names) if any(name.name == "distributed" for name in names):
                return True
            case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
                return True
    return False


def test_a_worker_that_has_loaded_a_model_has_no_more_than_it_needs(tmp_path: Path) -> None:
    """Each of these modules would delay the start of all workers on a machine by a second or more."""
    assert printed_by(AFTER_LOADING, str(make_checkpoint(tmp_path, "qwen3_moe"))) == "[]"
