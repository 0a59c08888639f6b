"""Setup of the whole suite: skipped tests with their reasons, and a check that nothing is left behind."""

import os
import shutil
from collections.abc import Generator, Iterator
from typing import Any

# Before torch is imported anywhere: the suite shares few cores with the processes it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from cluster.cli.doctor import MOONCAKE_PACKAGES, installed_version, missing_mooncake_packages
from cluster.compilation import CannotCompileError
from tests.leftovers import Before, find_leftovers
from workers.native.compile import find_compiler

REQUIRE = "BATON_REQUIRE"
"""Marks separated by commas, set by CI. Tests with such a mark must run, and skipping one is a failure."""

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60, print_blob=True)
settings.register_profile("dev", deadline=None, max_examples=60)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

_left_out = pytest.StashKey[dict[str, int]]()
_LEFT_OUT = "left_out"
_OPTIONS_OF_PLUGINS = {
    "asyncio": ("asyncio_mode", "asyncio_default_fixture_loop_scope"),
    "timeout": ("timeout",),
}
"""Options in pyproject.toml of plugins that GPU tests run without."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    for plugin, options in _OPTIONS_OF_PLUGINS.items():
        for option in options if not pluginmanager.has_plugin(plugin) else ():
            parser.addini(option, f"of the plugin {plugin}, which is not installed")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin("timeout"):
        config.addinivalue_line("markers", "timeout: of a plugin that is not installed")
    # Read at the first import of a kernel: all kernels of this process run on a GPU, or none do.
    if config.option.markexpr != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"
    config.stash[_left_out] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that this machine cannot run, and say what they need."""
    assert len({item.nodeid for item in items}) == len(items), "of tests of one name `pytest -n` runs one"
    missing = {
        "mooncake": _mooncake_missing(items),
        "native": _native_missing(items),
        "bf16": _bf16_missing(items),
        "gpu": _gpu_missing(items),
    }
    missing["chromium"] = None if shutil.which("chromium") else "apt-get install -y --no-install-recommends chromium"
    missing["kubectl"] = None if shutil.which("kubectl") else "kubectl, with kustomize in it"
    for mark, reason in missing.items():
        if reason is None:
            continue
        marked = [item for item in items if item.get_closest_marker(mark)]
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
        config.stash[_left_out][f"{mark}: {reason}"] = len(marked)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    required = [mark for mark in _required() if item.get_closest_marker(mark)]
    if required and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, but {REQUIRE} names {', '.join(required)}: {report.longrepr}"
    return report


def pytest_deselected(items: list[pytest.Item]) -> None:
    full = [item for item in items if item.get_closest_marker("full")]
    if full:
        full[0].config.stash[_left_out]["full: the rest of the matrix; `make test-full` runs it"] = len(full)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.side_by_side import OneClusterAtATime

    return OneClusterAtATime(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker of `pytest -n` has seen all tests and has run some."""
    node.config.stash[_left_out].update(node.workeroutput.get(_LEFT_OUT, {}))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A session that must run some tests but collected none has failed, too."""
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput[_LEFT_OUT] = config.stash[_left_out]
        return
    if exitstatus != pytest.ExitCode.OK or config.option.collectonly:
        return
    for mark in _required():
        if not _has_tested(config, mark):
            config.stash[_left_out][f"{mark}: {REQUIRE} names it, but no such test passed"] = 0
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[_left_out]:
        terminalreporter.section("left out")
        for what, count in config.stash[_left_out].items():
            terminalreporter.line(f"{count:>5}  {what}")


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the session's last test if a process or a file in shared memory outlives the session."""
    before = Before.now()
    yield
    leftovers = find_leftovers(before)
    if leftovers:
        pytest.fail("left behind by this session:\n" + "\n".join(leftovers), pytrace=False)


def _required() -> list[str]:
    return [mark for mark in os.environ.get(REQUIRE, "").split(",") if mark]


def _has_tested(config: pytest.Config, mark: str) -> bool:
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    return any(report.when == "call" and mark in report.keywords for report in reporter.getreports("passed"))


def _mooncake_missing(items: list[pytest.Item]) -> str | None:
    if not any(item.get_closest_marker("mooncake") for item in items):
        return None
    if packages := missing_mooncake_packages():
        return f"apt-get install -y {' '.join(packages)}"
    if any(map(installed_version, MOONCAKE_PACKAGES)):
        return None
    return "pip install -c constraints.txt -e '.[mooncake]'"


def _native_missing(items: list[pytest.Item]) -> str | None:
    if not any(item.get_closest_marker("native") for item in items):
        return None
    try:
        find_compiler()
    except CannotCompileError as error:
        return f"{error}; {error.fix}" if error.fix else str(error)
    return None


def _bf16_missing(items: list[pytest.Item]) -> str | None:
    if not any(item.get_closest_marker("bf16") for item in items):
        return None
    from workers.device import CPU

    return None if CPU.packs_bf16 else "a CPU with instructions for bf16"


def _gpu_missing(items: list[pytest.Item]) -> str | None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return None
    if os.environ.get("TRITON_INTERPRET"):
        return "needs a CUDA device and a session of its own: `pytest -m gpu tests/gpu`"
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device and a CUDA build of torch"
