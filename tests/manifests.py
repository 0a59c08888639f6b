"""The Kubernetes manifests of deploy/kuberay as data."""

import shlex
from pathlib import Path
from typing import Any

import yaml

from tests import readme

FOLDER = readme.ROOT / "deploy" / "kuberay"
IMAGE_FOLDER = "/opt/baton/"
"""Where the image has this repository."""


def objects() -> dict[str, dict[str, Any]]:
    """Every object, by its file and kind."""
    return {
        f"{path.name}/{found['kind']}": found
        for path in sorted(FOLDER.glob("*.yaml"))
        for found in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    }


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    """Those of one kind, by file."""
    return {name.split("/")[0]: found for name, found in objects().items() if found["kind"] == kind}


def cluster_spec(found: dict[str, Any]) -> dict[str, Any]:
    """The Ray cluster that a RayJob or a RayCluster makes."""
    spec: dict[str, Any] = found["spec"]
    return spec["rayClusterSpec"] if found["kind"] == "RayJob" else spec


def container(group: dict[str, Any]) -> dict[str, Any]:
    """The one container of a group's pods."""
    (only,) = group["template"]["spec"]["containers"]
    return dict(only)


def entrypoints() -> dict[str, list[str]]:
    """The command that starts Baton, by the file that has it; a RayCluster's is in the comment above it."""
    found = {name: shlex.split(job["spec"]["entrypoint"]) for name, job in of_kind("RayJob").items()}
    for name in of_kind("RayCluster"):
        (line,) = (line for line in (FOLDER / name).read_text(encoding="utf-8").splitlines() if " -- baton up " in line)
        found[name] = shlex.split(line.rpartition(" -- ")[2])
    return found


def here(path: str) -> Path:
    """The file of this repository that the image has at a path."""
    return readme.ROOT / path.removeprefix(IMAGE_FOLDER)
