"""The kustomizations in deploy/: kubectl renders what the other tests check, and monitoring fits the pods."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests import manifests, readme
from tests.manifests import Object, container, groups, the


def test_there_is_an_overlay_for_each_file_for_gpus_and_for_the_demo() -> None:
    for_gpus = {
        path.stem for path in (readme.ROOT / "deploy").glob("*.yaml") if path.stem.startswith(("gpu-", "h200-"))
    }
    assert set(manifests.OVERLAYS) == for_gpus | {manifests.SCALED, "local-cpu"}


@pytest.mark.kubectl
@pytest.mark.parametrize("folder", manifests.FOLDERS, ids=lambda path: path.name)
def test_kubectl_renders_the_same(folder: Path) -> None:
    options = [] if folder == manifests.MONITORING else ["--load-restrictor", "LoadRestrictionsNone"]
    text = subprocess.check_output(["kubectl", "kustomize", *options, folder], text=True)
    rendered, objects = list(yaml.safe_load_all(text)), manifests.render(folder)
    assert sorted(rendered, key=_kind) == sorted(objects, key=_kind)


@pytest.mark.kubectl
def test_overlays_of_the_page_change_what_they_say(tmp_path: Path) -> None:
    base = os.path.relpath(manifests.FOLDER, tmp_path)
    own, following = (
        block.replace("../baton/deploy/kuberay", base) for block in readme.blocks("yaml", "docs/kubernetes.md")
    )
    (tmp_path / "cluster.yaml").write_text("name: own\n", encoding="utf-8")
    objects = _rendered(tmp_path, own)
    assert the("ConfigMap", objects)["data"] == {"cluster.yaml": "name: own\n"}
    assert {container(group)["image"] for group in groups(objects)} == {"ghcr.io/you/baton:1"}
    objects, before = _rendered(tmp_path, following), manifests.overlay("h200-1x8")
    assert the("RayJob", objects)["metadata"]["name"] == "baton-next"
    the("RayJob", objects)["metadata"]["name"] = "baton"
    assert sorted(objects, key=_kind) == sorted(before, key=_kind)


def _rendered(folder: Path, text: str) -> list[Object]:
    (folder / "kustomization.yaml").write_text(text, encoding="utf-8")
    command = ["kubectl", "kustomize", "--load-restrictor", "LoadRestrictionsNone", str(folder)]
    return list(yaml.safe_load_all(subprocess.check_output(command, text=True)))


def _kind(found: Object) -> tuple[str, str]:
    return found["kind"], found["metadata"]["name"]


def test_prometheus_scrapes_the_router_and_grafana_finds_the_dashboard() -> None:
    monitoring, objects = manifests.render(manifests.MONITORING), manifests.overlay("local-cpu")
    monitor, service = the("PodMonitor", monitoring)["spec"], the("Service", objects)["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert monitor["selector"]["matchLabels"] == service["selector"]
    assert (endpoint["port"], endpoint["path"]) == (service["ports"][0]["targetPort"], "/metrics")
    dashboard = the("ConfigMap", monitoring)
    assert dashboard["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert json.loads(dashboard["data"]["baton.json"])["uid"] == "baton"
    assert the("PrometheusRule", monitoring)["metadata"]["name"] == "baton"
