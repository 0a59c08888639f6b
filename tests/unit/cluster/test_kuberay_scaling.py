"""The overlay with KEDA: its jobs' commands, their limits, and what these jobs may do."""

import re
from typing import Any

import pytest
from typer.main import get_command

from cluster.cli.app import app
from cluster.placement import place
from cluster.spec.errors import ConfigError
from tests import manifests
from tests.manifests import Object, config_of, groups, machines_of, of_kind, pods_of, the


@pytest.fixture
def objects() -> list[Object]:
    return manifests.overlay(manifests.SCALED)


@pytest.fixture
def commands(objects: list[Object]) -> dict[str, list[str]]:
    """Return the options of `baton scale` by the name of the job that runs it."""
    found = {}
    for job in of_kind("ScaledJob", objects):
        pod = job["spec"]["jobTargetRef"]["template"]["spec"]
        (only,) = pod["containers"]
        assert only["command"] == ["kubectl", "exec", "service/baton", "--container=ray-head", "--"]
        assert only["args"][:2] == ["baton", "scale"]
        assert pod["serviceAccountName"] == the("ServiceAccount", objects)["metadata"]["name"]
        found[job["metadata"]["name"]] = only["args"][2:]
    return found


def test_its_commands_are_those_of_the_command_line(commands: dict[str, list[str]]) -> None:
    baton: Any = get_command(app)
    scale = baton.commands["scale"]
    given = {name: scale.make_context("scale", list(options)).params for name, options in commands.items()}
    assert given["baton-scale-up"]["numbers"] == ["decode=4"]
    assert given["baton-scale-up"]["wait_s"] > 0, "the autoscaler adds a machine only if somebody waits for it"
    assert given["baton-scale-down"]["numbers"] == ["decode=2"]
    assert given["baton-scale-down"]["wait_s"] == 0


def test_it_returns_to_the_deploy_file_and_its_most_fits_on_the_most_machines(
    objects: list[Object], commands: dict[str, list[str]]
) -> None:
    config = config_of(objects)
    most, least = (int(commands[name][0].removeprefix("decode=")) for name in ("baton-scale-up", "baton-scale-down"))
    assert least == config.decode.replicas < most
    head, workers = groups(objects)
    grown = config.model_copy(update={"decode": config.decode.model_copy(update={"replicas": most})})
    place(grown, machines_of([head, *[workers] * workers["maxReplicas"]]))
    with pytest.raises(ConfigError):
        place(grown, machines_of(pods_of(objects)))


def test_it_acts_between_these_numbers_only(objects: list[Object], commands: dict[str, list[str]]) -> None:
    for job in of_kind("ScaledJob", objects):
        (trigger,) = job["spec"]["triggers"]
        number = commands[job["metadata"]["name"]][0].removeprefix("decode=")
        limit = r'sum\(baton_ready_replicas\{role="decode"\}\) [<>] bool ' + number
        assert re.search(limit, trigger["metadata"]["query"]), "it would run forever"
        assert job["spec"]["maxReplicaCount"] == 1, "the driver carries out one command at a time"


def test_it_may_run_commands_in_pods_and_no_more(objects: list[Object]) -> None:
    role, binding = the("Role", objects), the("RoleBinding", objects)
    allowed = {resource: set(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]}
    reading = {"get", "list"}
    assert allowed == {"services": reading, "pods": reading, "pods/exec": {"get", "create"}}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [each["name"] for each in binding["subjects"]] == [the("ServiceAccount", objects)["metadata"]["name"]]
