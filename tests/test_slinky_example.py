"""The Slinky example is of the form that Kubernetes and the chart take, and agrees with itself."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from slurm_hooks.config import load
from tests.test_slurm_conf_example import INSTALLED, settings

SLINKY = Path(__file__).parent.parent / "examples" / "slinky"
IN_THE_IMAGE = "/opt/slurm-recovery/bin/slurm-hook-"
"""An image holds the programs and their Python together: no `recovery init` stands between."""

SCHEMAS = Path(__file__).parent / "data" / "slinky"


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((SLINKY / "aggregator.yaml").read_text("utf-8")))


def values() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((SLINKY / "values.yaml").read_text("utf-8"))
    return document


def check(document: Any, schema: str) -> None:
    jsonschema.validate(document, json.loads((SCHEMAS / schema).read_text("utf-8")))


def test_the_values_have_only_keys_that_the_chart_has() -> None:
    check(values(), "values.json")


def test_the_manifests_have_the_form_of_their_kinds() -> None:
    kinds = [document["kind"] for document in manifests()]
    assert kinds == ["PersistentVolumeClaim"] * 2 + ["ServiceAccount", "Deployment"]
    for document in manifests():
        check(document, "manifests.json")


def test_every_volume_that_is_mounted_is_there_and_every_claim_is_made() -> None:
    pod = manifests()[-1]["spec"]["template"]["spec"]
    nodeset = values()["nodesets"]["slinky"]
    claims = {one["metadata"]["name"] for one in manifests() if "Claim" in one["kind"]}
    for mounts, volumes in (
        (pod["containers"][0]["volumeMounts"], pod["volumes"]),
        (nodeset["slurmd"]["volumeMounts"], nodeset["podSpec"]["volumes"]),
    ):
        assert {mount["name"] for mount in mounts} == {volume["name"] for volume in volumes}
        named = {volume.get("persistentVolumeClaim", {}).get("claimName") for volume in volumes}
        assert named - {None} <= claims


def test_the_configuration_in_the_values_loads_and_its_places_are_mounted(tmp_path: Path) -> None:
    path = tmp_path / "recovery.toml"
    path.write_text(values()["configFiles"]["recovery.toml"], "utf-8")
    config = load(path)
    assert (config.mode, config.slurm.backend) == ("monitor", "rest")
    pod = manifests()[-1]["spec"]["template"]["spec"]
    mounted = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert {str(config.spool.path), str(config.controller.state)} <= mounted
    assert str(Path(config.slurm.token).parent) in mounted
    slurmd = values()["nodesets"]["slinky"]["slurmd"]["volumeMounts"]
    assert {str(config.spool.path), config.spool.buffer} <= {one["mountPath"] for one in slurmd}


def test_the_aggregator_has_no_right_in_kubernetes() -> None:
    account, deployment = manifests()[-2:]
    assert account["automountServiceAccountToken"] is False
    assert deployment["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_slurm_runs_each_hook_as_slurm_conf_example_says() -> None:
    asked = {key: value.replace(INSTALLED, IN_THE_IMAGE) for key, value in settings().items()}
    for key in ("Prolog", "Epilog"):
        script = next(iter(values()[f"{key.lower()}Scripts"].values()))
        assert f"\nhook={asked[key]}\n" in script
    theirs = values()["controller"]["extraConfMap"]
    assert {"HealthCheckProgram", "TaskProlog", "MinJobAge", "JobRequeue"} <= set(theirs)
    # From 25.11 on the time-out must be smaller than the interval, whose default would not be.
    assert int(theirs.pop("HealthCheckTimeout")) < int(theirs["HealthCheckInterval"])
    assert theirs == {key: asked[key] for key in theirs}


@pytest.mark.parametrize("kind", ["prolog", "epilog"])
def test_a_script_runs_its_hook_and_an_image_without_it_drains_no_node(
    kind: str, tmp_path: Path
) -> None:
    (script,) = values()[f"{kind}Scripts"].values()
    hook = tmp_path / "hook"
    script = script.replace(f"{IN_THE_IMAGE}{kind}", str(hook))
    run = partial(subprocess.run, ["/bin/sh", "-c", script])
    assert run().returncode == 0
    hook.write_text("#!/bin/sh\nexit 7\n")
    hook.chmod(0o755)
    assert run().returncode == 7, "a closed gate must be heard"
