"""The Kubernetes manifests of deploy/kuberay as data."""

import shlex
from pathlib import Path
from typing import Any

import yaml

from tests import readme

FOLDER = readme.ROOT / "deploy" / "kuberay"
IMAGE_FOLDER = "/opt/baton/"
"""Path of this repository in the image."""


def objects() -> dict[str, dict[str, Any]]:
    """Return every object by file and kind."""
    return {
        f"{path.name}/{found['kind']}": found
        for path in sorted(FOLDER.glob("*.yaml"))
        for found in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    }


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    """Return the objects of one kind by file."""
    return {name.split("/")[0]: found for name, found in objects().items() if found["kind"] == kind}


def cluster_spec(found: dict[str, Any]) -> dict[str, Any]:
    """Return the Ray cluster that a RayJob or a RayCluster creates."""
    spec: dict[str, Any] = found["spec"]
    return spec["rayClusterSpec"] if found["kind"] == "RayJob" else spec


def container(group: dict[str, Any]) -> dict[str, Any]:
    """Return the only container in a group's pods."""
    (only,) = group["template"]["spec"]["containers"]
    return dict(only)


def entrypoints() -> dict[str, list[str]]:
    """Return the command that starts Baton, by file. A RayCluster has it in the comment above it."""
    found = {name: shlex.split(job["spec"]["entrypoint"]) for name, job in of_kind("RayJob").items()}
    for name in of_kind("RayCluster"):
        (line,) = (line for line in (FOLDER / name).read_text(encoding="utf-8").splitlines() if " -- baton up " in line)
        found[name] = shlex.split(line.rpartition(" -- ")[2])
    return found


def here(path: str) -> Path:
    """Return the file in this repository for a path in the image."""
    return readme.ROOT / path.removeprefix(IMAGE_FOLDER)
