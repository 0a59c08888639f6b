"""The manifests in deploy/kuberay: what KubeRay allows, and what their deploy files need."""

import json
import re
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.actors import Machine
from cluster.placement import place
from cluster.spec.config import DeployConfig, TransferProtocol
from cluster.spec.loader import load_config
from tests import manifests, readme

CLUSTERS = manifests.of_kind("RayJob") | manifests.of_kind("RayCluster")
SCHEMA = json.loads((readme.ROOT / "tests" / "data" / "kuberay" / "rayjob.schema.json").read_text(encoding="utf-8"))
"""Schema of RayJob from KubeRay's CustomResourceDefinition (Apache-2.0), which includes the spec of a RayCluster."""


def config_of(name: str) -> DeployConfig:
    """Return the configuration that a manifest's command starts."""
    program, command, file, *options = manifests.entrypoints()[name]
    assert (program, command, options[::2]) == ("baton", "up", ["--set"] * (len(options) // 2))
    return load_config(manifests.here(file), dict(option.split("=", 1) for option in options[1::2]))


def machines_of(name: str) -> list[Machine]:
    """Return the pods as Ray would report them."""
    spec = manifests.cluster_spec(CLUSTERS[name])
    groups = [spec["headGroupSpec"], *(group for group in spec["workerGroupSpecs"] for _ in range(group["replicas"]))]
    return [
        Machine(
            node_id=f"{number}",
            address=f"10.0.0.{number}",
            cpus=float(group["rayStartParams"]["num-cpus"]),
            gpus=float(manifests.container(group)["resources"]["limits"].get("nvidia.com/gpu", 0)),
        )
        for number, group in enumerate(groups)
    ]


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with unknown fields refused. The API server would drop them."""
    parts = {key: strict(part) for key, part in schema.get("properties", {}).items()}
    closed = {"additionalProperties": False} if parts and not schema.get("x-kubernetes-preserve-unknown-fields") else {}
    items = {"items": strict(schema["items"])} if isinstance(schema.get("items"), dict) else {}
    return {**schema, **closed, **items, **({"properties": parts} if parts else {})}


def test_a_field_that_kuberay_does_not_know_is_found() -> None:
    schema = strict(SCHEMA["properties"]["spec"])
    with pytest.raises(jsonschema.ValidationError, match="shutdownAfterFinish"):
        jsonschema.Draft202012Validator(schema).validate({"shutdownAfterFinish": True})


@pytest.mark.parametrize("name", CLUSTERS)
class TestClusters:
    def test_kuberay_knows_every_field(self, name: str) -> None:
        found, schema = CLUSTERS[name], strict(SCHEMA["properties"]["spec"])
        if found["kind"] == "RayCluster":
            schema = schema["properties"]["rayClusterSpec"]
        jsonschema.Draft202012Validator(schema).validate(found["spec"])
        assert set(found) == {"apiVersion", "kind", "metadata", "spec"}
        assert found["apiVersion"] == "ray.io/v1"

    def test_all_workers_fit_on_its_pods_and_none_on_the_head(self, name: str) -> None:
        head, *workers = machines_of(name)
        placements = place(config_of(name), [head, *workers])
        used = {bundle.node_id for placement in placements for bundle in placement.bundles}
        assert used == {worker.node_id for worker in workers}

    def test_a_worker_has_the_cpus_that_ray_thinks_it_has(self, name: str) -> None:
        for group in manifests.cluster_spec(CLUSTERS[name])["workerGroupSpecs"]:
            resources = manifests.container(group)["resources"]
            if "nvidia.com/gpu" in resources["limits"]:
                assert resources["requests"]["cpu"] == group["rayStartParams"]["num-cpus"]
            assert resources["requests"] | resources["limits"] == resources["requests"], "requests are the limits"

    def test_the_service_reaches_its_router(self, name: str) -> None:
        (service,) = manifests.of_kind("Service").values()
        head = manifests.cluster_spec(CLUSTERS[name])["headGroupSpec"]
        ports = {port["name"]: port["containerPort"] for port in manifests.container(head)["ports"]}
        (port,) = service["spec"]["ports"]
        router = config_of(name).router
        assert (router.host, router.port) == ("0.0.0.0", ports[port["targetPort"]])
        assert service["spec"]["selector"].items() <= head["template"]["metadata"]["labels"].items()

    def test_the_policy_shields_every_pod_and_names_ports_that_the_head_has(self, name: str) -> None:
        (policy,) = manifests.of_kind("NetworkPolicy").values()
        spec = manifests.cluster_spec(CLUSTERS[name])
        shielded = policy["spec"]["podSelector"]["matchLabels"].items()
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            assert shielded <= group["template"]["metadata"]["labels"].items()
        named = {port["name"] for port in manifests.container(spec["headGroupSpec"])["ports"]}
        opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])}
        assert opened <= named

    def test_labels_reserved_by_kuberay_are_not_set(self, name: str) -> None:
        spec = manifests.cluster_spec(CLUSTERS[name])
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            labels = group["template"]["metadata"]["labels"]
            assert not labels.keys() & {"app.kubernetes.io/name", "app.kubernetes.io/created-by"}
            assert not any(label.startswith("ray.io/") for label in labels)

    def test_ray_is_the_one_that_the_image_has(self, name: str) -> None:
        (pinned,) = re.findall(
            r"^ray==(.+)$", (readme.ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
        )
        assert manifests.cluster_spec(CLUSTERS[name])["rayVersion"] == pinned

    def test_memory_that_gpus_read_may_be_locked(self, name: str) -> None:
        uses_cards = config_of(name).transfer.protocol is TransferProtocol.RDMA
        for group in manifests.cluster_spec(CLUSTERS[name])["workerGroupSpecs"]:
            added = manifests.container(group).get("securityContext", {}).get("capabilities", {}).get("add", [])
            assert ("IPC_LOCK" in added) == uses_cards


@pytest.mark.parametrize("name", manifests.of_kind("RayJob"))
class TestJobs:
    def test_it_may_drain_for_as_long_as_any_job(self, name: str) -> None:
        environment = yaml.safe_load((readme.ROOT / "deploy" / "job.yaml").read_text(encoding="utf-8"))
        assert yaml.safe_load(CLUSTERS[name]["spec"]["runtimeEnvYAML"])["env_vars"] == environment["env_vars"]

    def test_its_head_supports_injected_sidecars(self, name: str) -> None:
        """KubeRay refuses other restart policies and submitter templates in this mode."""
        spec = CLUSTERS[name]["spec"]
        assert spec["submissionMode"] == "SidecarMode"
        assert not spec.keys() & {"submitterPodTemplate", "submitterConfig", "clusterSelector"}
        assert "restartPolicy" not in spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]

    def test_when_it_ends_its_pods_end(self, name: str) -> None:
        assert CLUSTERS[name]["spec"]["shutdownAfterJobFinishes"] is True


def test_prometheus_scrapes_the_router() -> None:
    (monitor,) = manifests.of_kind("PodMonitor").values()
    (service,) = manifests.of_kind("Service").values()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert monitor["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert (endpoint["port"], endpoint["path"]) == (service["spec"]["ports"][0]["targetPort"], "/metrics")


def test_the_image_has_the_torch_that_make_installs() -> None:
    (version,) = re.findall(r"^TORCH +\?= (.+)$", (readme.ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    image = (manifests.FOLDER / "Dockerfile").read_text(encoding="utf-8")
    assert f"ARG TORCH={version.removesuffix('+cpu')}\n" in image
    assert f"--build-arg TORCH={version} " in image
