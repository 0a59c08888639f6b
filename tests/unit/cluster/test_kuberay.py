"""The manifests in deploy/kuberay: what KubeRay and Kubernetes allow, and what their deploy files need."""

import json
import os
import re
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.placement import place
from cluster.ray_system.environ import set_for_own_cluster
from cluster.spec import env
from cluster.spec.config import DeployConfig, TransferProtocol
from router.server import RouterServer
from tests import manifests, readme
from tests.manifests import Object, config_of, container, groups, machines_of, pods_of, the

SCHEMA = json.loads((readme.ROOT / "tests" / "data" / "kuberay" / "rayjob.schema.json").read_text(encoding="utf-8"))
"""Schema of RayJob from KubeRay's CustomResourceDefinition (Apache-2.0), which includes the spec of a RayCluster."""


@pytest.fixture(params=manifests.OVERLAYS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def objects(name: str) -> list[Object]:
    return manifests.overlay(name)


@pytest.fixture
def config(objects: list[Object]) -> DeployConfig:
    return config_of(objects)


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


class TestJob:
    def test_kuberay_knows_every_field(self, objects: list[Object]) -> None:
        job = the("RayJob", objects)
        jsonschema.Draft202012Validator(strict(SCHEMA["properties"]["spec"])).validate(job["spec"])
        assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
        assert job["apiVersion"] == "ray.io/v1"

    def test_it_starts_the_topology_that_the_overlay_is_named_after(self, name: str, config: DeployConfig) -> None:
        assert config.name == name.removesuffix("-keda")

    def test_it_may_drain_for_as_long_as_any_job(self, objects: list[Object]) -> None:
        environment = yaml.safe_load((readme.ROOT / "deploy" / "job.yaml").read_text(encoding="utf-8"))
        assert yaml.safe_load(the("RayJob", objects)["spec"]["runtimeEnvYAML"])["env_vars"] == environment["env_vars"]

    def test_its_head_supports_injected_sidecars(self, objects: list[Object]) -> None:
        """KubeRay refuses other restart policies and submitter templates in this mode."""
        spec = the("RayJob", objects)["spec"]
        assert spec["submissionMode"] == "SidecarMode"
        assert not spec.keys() & {"submitterPodTemplate", "submitterConfig", "clusterSelector"}
        assert "restartPolicy" not in spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]

    def test_when_it_ends_its_pods_end(self, objects: list[Object]) -> None:
        assert the("RayJob", objects)["spec"]["shutdownAfterJobFinishes"] is True

    def test_its_deadline_leaves_the_workers_the_time_that_the_deploy_file_allows(
        self, objects: list[Object], config: DeployConfig
    ) -> None:
        """KubeRay counts a job as running once the head is ready, which is when Baton serves."""
        assert the("RayJob", objects)["spec"]["preRunningDeadlineSeconds"] >= 2 * config.resources.start_timeout_s

    def test_ray_is_the_one_that_the_image_has(self, objects: list[Object]) -> None:
        (pinned,) = re.findall(
            r"^ray==(.+)$", (readme.ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
        )
        assert the("RayJob", objects)["spec"]["rayClusterSpec"]["rayVersion"] == pinned


class TestPods:
    def test_all_workers_fit_on_them_and_none_on_the_head(self, objects: list[Object], config: DeployConfig) -> None:
        head, *workers = machines_of(pods_of(objects))
        used = {bundle.node_id for placement in place(config, [head, *workers]) for bundle in placement.bundles}
        assert used == {worker.node_id for worker in workers}

    def test_a_worker_has_the_cpus_that_ray_thinks_it_has(self, objects: list[Object]) -> None:
        for group in groups(objects)[1:]:
            resources = container(group)["resources"]
            if "nvidia.com/gpu" in resources["limits"]:
                assert resources["requests"]["cpu"] == group["rayStartParams"]["num-cpus"]
            assert resources["requests"] | resources["limits"] == resources["requests"], "requests are the limits"

    def test_their_number_is_fixed_without_an_autoscaler(self, objects: list[Object]) -> None:
        has_autoscaler = the("RayJob", objects)["spec"]["rayClusterSpec"].get("enableInTreeAutoscaling", False)
        for group in groups(objects)[1:]:
            assert group["minReplicas"] == group["replicas"]
            assert (group["replicas"] < group["maxReplicas"]) == has_autoscaler

    def test_labels_reserved_by_kuberay_are_not_set(self, objects: list[Object]) -> None:
        for group in groups(objects):
            labels = group["template"]["metadata"]["labels"]
            assert not labels.keys() & {"app.kubernetes.io/name", "app.kubernetes.io/created-by"}
            assert not any(label.startswith("ray.io/") for label in labels)

    def test_memory_that_gpus_read_may_be_locked(self, objects: list[Object], config: DeployConfig) -> None:
        uses_cards = config.transfer.protocol is TransferProtocol.RDMA
        for group in groups(objects)[1:]:
            added = container(group).get("securityContext", {}).get("capabilities", {}).get("add", [])
            assert ("IPC_LOCK" in added) == uses_cards

    def test_the_head_is_ready_when_the_router_is(self, objects: list[Object], config: DeployConfig) -> None:
        probe = container(groups(objects)[0])["readinessProbe"]["httpGet"]
        assert _ports(objects)[probe["port"]] == config.router.port
        router = RouterServer.__module__.partition(".")[0]
        source = (readme.ROOT / router / "api" / "status.py").read_text(encoding="utf-8")
        assert f'@router.get("{probe["path"]}")\n    async def ready()' in source

    def test_no_probe_of_ours_ends_a_pod(self, objects: list[Object]) -> None:
        """KubeRay's own probe of liveness checks Ray, which does not wait for a model."""
        for group in groups(objects):
            assert not container(group).keys() & {"livenessProbe", "startupProbe"}
        for group in groups(objects)[1:]:
            assert "readinessProbe" not in container(group), "the head would wait for workers that wait for the head"

    def test_volumes_that_they_mount_exist(self, objects: list[Object]) -> None:
        found = {(each["kind"], each["metadata"]["name"]) for each in objects}
        for group in groups(objects):
            volumes = {volume["name"]: volume for volume in group["template"]["spec"].get("volumes", [])}
            assert {mount["name"] for mount in container(group)["volumeMounts"]} == volumes.keys()
            for volume in volumes.values():
                config_map, claim = volume.get("configMap"), volume.get("persistentVolumeClaim")
                source = (
                    ("ConfigMap", config_map["name"]) if config_map else ("PersistentVolumeClaim", claim["claimName"])
                )
                assert source in found

    def test_workers_download_to_the_claim_that_all_of_them_can_mount(self, objects: list[Object]) -> None:
        head, *workers = pods_of(objects)
        (mode,) = the("PersistentVolumeClaim", objects)["spec"]["accessModes"]
        assert mode == "ReadWriteMany" or len(workers) == 1
        image = (manifests.FOLDER / "Dockerfile").read_text(encoding="utf-8")
        (user, folder) = (*re.findall(r"--uid (\d+) baton", image), *re.findall(r"HF_HOME=(\S+)", image))
        for group in workers:
            (mount,) = container(group)["volumeMounts"]
            assert mount["mountPath"] == folder
            assert group["template"]["spec"]["securityContext"]["fsGroup"] == int(user)
        assert folder not in {mount["mountPath"] for mount in container(head)["volumeMounts"]}

    def test_secrets_are_given_where_they_are_read_and_nowhere_else(self, objects: list[Object]) -> None:
        head, *workers = groups(objects)
        keys = {env.API_KEYS.name: "api-keys", env.ADMIN_KEY.name: "admin-key"}
        assert _secrets(head) == {**keys, "HF_TOKEN": "hf-token"}
        assert all(_secrets(group) == {"HF_TOKEN": "hf-token"} for group in workers)

    def test_a_pod_without_keys_does_not_start(self, objects: list[Object]) -> None:
        """An endpoint must not be open because somebody forgot the secret. Only the token for the hub is optional."""
        for group in groups(objects):
            for variable in container(group)["env"]:
                reference = variable["valueFrom"]["secretKeyRef"]
                assert reference.get("optional", False) == (reference["key"] == "hf-token")


def _ports(objects: list[Object]) -> dict[str, int]:
    """Return the head's ports by name."""
    return {port["name"]: port["containerPort"] for port in container(groups(objects)[0])["ports"]}


def _secrets(group: Object) -> dict[str, str]:
    """Return the keys of the secret by environment variable."""
    found = {}
    for variable in container(group)["env"]:
        reference = variable["valueFrom"]["secretKeyRef"]
        assert reference["name"] == "baton"
        found[variable["name"]] = reference["key"]
    return found


class TestOthers:
    def test_the_service_reaches_the_router(self, objects: list[Object], config: DeployConfig) -> None:
        service = the("Service", objects)["spec"]
        (port,) = service["ports"]
        assert (config.router.host, config.router.port) == ("0.0.0.0", _ports(objects)[port["targetPort"]])
        reached = [service["selector"].items() <= _labels(group).items() for group in groups(objects)]
        assert reached == [True] + [False] * (len(reached) - 1), "only the head has a router"

    def test_the_policy_shields_every_pod_and_names_ports_that_the_head_has(self, objects: list[Object]) -> None:
        policy = the("NetworkPolicy", objects)["spec"]
        assert all(policy["podSelector"]["matchLabels"].items() <= _labels(group).items() for group in groups(objects))
        opened = {port["port"] for rule in policy["ingress"] for port in rule.get("ports", [])}
        assert opened <= _ports(objects).keys()

    def test_no_pod_may_be_evicted_while_clusters_serve(self, objects: list[Object]) -> None:
        """Kubernetes counts no unavailable pods, nor a share of them, if the pods' owner has no scale.

        The pods of all clusters in a namespace count together, and each cluster brings the same budget.
        """
        budget = the("PodDisruptionBudget", objects)["spec"]
        assert all(budget["selector"]["matchLabels"].items() <= _labels(group).items() for group in groups(objects))
        most = sum(group.get("maxReplicas", 1) for group in groups(objects))
        assert budget["minAvailable"] > 100 * most
        assert "maxUnavailable" not in budget


def _labels(group: Object) -> dict[str, str]:
    found: dict[str, str] = group["template"]["metadata"]["labels"]
    return found


def test_workers_in_the_image_are_as_urgent_as_those_of_ray_that_baton_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    own: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", own)
    set_for_own_cluster()
    image = (manifests.FOLDER / "Dockerfile").read_text(encoding="utf-8")
    assert f"RAY_worker_niceness={own['RAY_worker_niceness']} " in image


def test_the_image_has_the_torch_that_make_installs() -> None:
    (version,) = re.findall(r"^TORCH +\?= (.+)$", (readme.ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    image = (manifests.FOLDER / "Dockerfile").read_text(encoding="utf-8")
    assert f"ARG TORCH={version.removesuffix('+cpu')}\n" in image
    assert f"--build-arg TORCH={version} " in image
