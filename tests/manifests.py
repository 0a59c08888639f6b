"""The Kubernetes manifests of deploy/ as data, rendered like `kubectl kustomize` does."""

import shlex
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from cluster.actors import Machine
from cluster.spec.config import DeployConfig
from cluster.spec.loader import load_config
from tests import readme

Object = dict[str, Any]
FOLDER = readme.ROOT / "deploy" / "kuberay"
OVERLAYS = sorted(path.parent.name for path in FOLDER.glob("overlays/*/kustomization.yaml"))
MONITORING = readme.ROOT / "deploy" / "grafana"
SCALED = "h200-2x8-ring-keda"
"""Overlay whose number of replicas follows the load."""
DEPLOY_FOLDER = "/etc/baton/"
"""Folder of the deploy file in the head's pod."""
FOLDERS = [*(FOLDER / "overlays" / name for name in OVERLAYS), MONITORING]
"""Folders that an operator applies."""
_BOILERPLATE = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}


def overlay(name: str) -> list[Object]:
    """Return the objects of an overlay."""
    return render(FOLDER / "overlays" / name)


def render(folder: Path) -> list[Object]:
    """Return the objects of a kustomization. Knows the few features that the manifests use, and refuses others."""
    found = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    assert found.items() >= _BOILERPLATE.items(), folder
    assert found.keys() <= {*_BOILERPLATE, "resources", "configMapGenerator", "patches", "images"}, folder
    objects = [each for name in found["resources"] for each in _resource(folder / name)]
    for given in found.get("configMapGenerator", []):
        _add_config_map(folder, given, objects)
    for patch in found.get("patches", []):
        _patch(folder, patch, objects)
    for image in found.get("images", []):
        _name_image(image, objects)
    return objects


def of_kind(kind: str, objects: list[Object]) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def the(kind: str, objects: list[Object]) -> Object:
    """Return the only object of a kind."""
    (only,) = of_kind(kind, objects)
    return only


def groups(objects: list[Object]) -> list[Object]:
    """Return the groups of pods of the only Ray cluster, the head's first."""
    spec = the("RayJob", objects)["spec"]["rayClusterSpec"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def container(group: Object) -> Object:
    """Return the only container in a group's pods."""
    (only,) = group["template"]["spec"]["containers"]
    return dict(only)


def config_of(objects: list[Object]) -> DeployConfig:
    """Return the configuration that the job starts."""
    program, command, file, *options = shlex.split(the("RayJob", objects)["spec"]["entrypoint"])
    assert (program, command, options[::2]) == ("baton", "up", ["--set"] * (len(options) // 2))
    text = the("ConfigMap", objects)["data"][file.removeprefix(DEPLOY_FOLDER)]
    (path,) = (path for path in (readme.ROOT / "deploy").glob("*.yaml") if path.read_text(encoding="utf-8") == text)
    return load_config(path, dict(option.split("=", 1) for option in options[1::2]))


def pods_of(objects: list[Object]) -> list[Object]:
    """Return the group of every pod, the head first."""
    head, *workers = groups(objects)
    return [head, *(group for group in workers for _ in range(group["replicas"]))]


def machines_of(pods: list[Object]) -> list[Machine]:
    """Return pods as Ray would report them."""
    return [
        Machine(
            node_id=f"{number}",
            address=f"10.0.0.{number}",
            cpus=float(group["rayStartParams"]["num-cpus"]),
            gpus=float(container(group)["resources"]["limits"].get("nvidia.com/gpu", 0)),
        )
        for number, group in enumerate(pods)
    ]


def _resource(path: Path) -> list[Object]:
    return render(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def _add_config_map(folder: Path, given: Object, objects: list[Object]) -> None:
    """Add a map, or replace its data."""
    made, behavior = _config_map(folder, given), given.get("behavior", "create")
    assert behavior in {"create", "replace"}, given
    if behavior == "create":
        objects.append(made)
    else:
        (target,) = (each for each in of_kind("ConfigMap", objects) if each["metadata"] == made["metadata"])
        target["data"] = made["data"]


def _config_map(folder: Path, given: Object) -> Object:
    options = given["options"]
    # With a suffix, kustomize would rename the map but not its use in a RayJob, whose fields it does not know.
    assert options["disableNameSuffixHash"] is True, given
    files = dict(reversed(file.split("=", 1)) if "=" in file else (file, file) for file in given["files"])
    data = {key: (folder / file).read_text(encoding="utf-8") for file, key in files.items()}
    labels = {"labels": options["labels"]} if "labels" in options else {}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": given["name"], **labels}, "data": data}


def _patch(folder: Path, given: Object, objects: list[Object]) -> None:
    """Apply JSON patches (RFC 6902) in place."""
    text = given["patch"] if "patch" in given else (folder / given["path"]).read_text(encoding="utf-8")
    kind, name = given["target"]["kind"], given["target"]["name"]
    (target,) = (each for each in of_kind(kind, objects) if each["metadata"]["name"] == name)
    for step in yaml.safe_load(text):
        *way, last = (_key(part) for part in step["path"].removeprefix("/").split("/"))
        parent: Any = target
        for key in way:
            parent = parent[key]
        assert step["op"] in {"add", "replace"}, step
        assert isinstance(parent, dict), "lists are replaced as a whole"
        assert (last in parent) == (step["op"] == "replace"), step
        parent[last] = deepcopy(step["value"])


def _key(part: str) -> int | str:
    return int(part) if part.isdecimal() else part.replace("~1", "/").replace("~0", "~")


def _name_image(given: Object, objects: list[Object]) -> None:
    for each in objects:
        for holder in _containers(each):
            if holder["image"] == given["name"]:
                holder["image"] = f"{given.get('newName', given['name'])}:{given['newTag']}"


def _containers(part: Any) -> list[Object]:
    if isinstance(part, list):
        return [found for each in part for found in _containers(each)]
    if not isinstance(part, dict):
        return []
    return [*part.get("containers", []), *(found for each in part.values() for found in _containers(each))]
