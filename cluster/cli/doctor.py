"""`baton doctor`: print the findings of checks.py with suggested fixes."""

import dataclasses
import json
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from cluster.cli import checks
from cluster.cli.checks import Finding, Status

CHECKS: tuple[Callable[[], Finding], ...] = (
    checks.check_python,
    checks.check_packages,
    checks.check_ray,
    checks.check_torch,
    checks.check_mooncake,
    checks.check_port,
    checks.check_memory,
    checks.check_attention,
)

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Check this machine and suggest a fix for each finding; exit code 1 if the default cluster cannot start."""
    findings = [check() for check in CHECKS]
    failed = any(finding.status is Status.FAIL for finding in findings)
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [dataclasses.asdict(finding) for finding in findings]}))
    else:
        _print(findings)
    if failed:
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        line = Text.assemble((f"{finding.status:<5}", _STYLES[finding.status]), f"{finding.name:<14}", finding.found)
        console.print(line)
        if finding.mend:
            console.print(Text(f"     {'':<14}-> {finding.mend}", style="dim"))
