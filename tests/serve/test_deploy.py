"""The files for clusters fit the schemas of their programs, and agree with each other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.scripts.scripts import start
from ray.serve.schema import ServeDeploySchema

from engines.folders.export_folder import PRECISIONS
from serve import cli
from serve.fleet.autoscaling import SCALING
from serve.front.access import OPEN_PATHS
from serve.settings import ServeSettings, is_loopback, read
from tests.serve.rayservice_schema import RAY_SERVICE
from tests.serve.services import ROOT
from tests.tools import tool

DEPLOY = ROOT / "serve" / "deploy"
START_NODE = DEPLOY / "start_node.sh"
KUBERNETES = "1.34"
SERVE_CONFIGS = ("sdxl.yaml", "one_host.yaml", "one_host_llm.yaml", "several_nodes.yaml")


def kuberay() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))


def ray_service() -> dict[str, Any]:
    (found,) = (document for document in kuberay() if document["kind"] == "RayService")
    return found


def serve_configs() -> dict[str, dict[str, Any]]:
    found = {name: yaml.safe_load((DEPLOY / name).read_text()) for name in SERVE_CONFIGS}
    return found | {"kuberay.yaml": yaml.safe_load(ray_service()["spec"]["serveConfigV2"])}


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def pod_templates() -> dict[str, dict[str, Any]]:
    cluster = ray_service()["spec"]["rayClusterConfig"]
    workers = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"], **workers}


@pytest.mark.parametrize("name", [*SERVE_CONFIGS, "kuberay.yaml"])
def test_ray_takes_every_serve_config_and_its_arguments_are_settings(name: str) -> None:
    """A service on GPUs names its backend and precision, so that none is chosen automatically."""
    config = serve_configs()[name]
    ServeDeploySchema.model_validate(config)
    (application,) = config["applications"]
    assert application["import_path"] == "serve.app:build"
    settings = ServeSettings(**application["args"])
    assert settings.keys or is_loopback(config["http_options"]["host"])
    if settings.device == "gpu":
        assert settings.backend == "tensorrt" and settings.precision in PRECISIONS


def test_compose_takes_every_gpu_and_names_its_engines() -> None:
    service = compose()["services"]["sdxl"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    settings = read(environment=defaults_of(service["environment"]))
    assert device["count"] == "all"
    assert settings.backend == "tensorrt" and settings.precision in PRECISIONS
    assert settings.model.startswith("/models/"), "no engines are built for the embedded model"


def defaults_of(environment: dict[str, str]) -> dict[str, str]:
    """Return compose's defaults for variables that the shell does not set."""
    return {name: re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", text) for name, text in environment.items()}


def test_one_host_has_a_gpu_for_the_language_model() -> None:
    with_llm, without = (
        ServeSettings(**serve_configs()[name]["applications"][0]["args"])
        for name in ("one_host_llm.yaml", "one_host.yaml")
    )
    assert with_llm.replicas + with_llm.llm_replicas == without.replicas == 8
    assert with_llm.llm not in ("none", "mini") and with_llm.llm_backend == "tensorrt-llm"


@pytest.mark.parametrize("name", ["several_nodes.yaml", "kuberay.yaml"])
def test_where_there_are_several_nodes_results_have_a_folder(name: str) -> None:
    assert serve_configs()[name]["applications"][0]["args"]["results_dir"]


def test_a_field_that_does_not_exist_is_refused() -> None:
    service = ray_service()
    service["spec"]["rayClusterConfig"]["authOption"] = {}
    with pytest.raises(jsonschema.ValidationError, match="authOption"):
        jsonschema.Draft202012Validator(RAY_SERVICE).validate(service)
    template = pod_templates()["head"]
    template["spec"]["containers"][0]["volumeMount"] = []
    wrapped = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
    with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
        kubernetes_validate.validate(wrapped, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", pod_templates())
def test_pods_run_without_rights_on_a_read_only_root(name: str) -> None:
    spec = pod_templates()[name]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    for container in spec["containers"]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize("name", pod_templates())
def test_ray_s_environment_is_the_same_everywhere(name: str) -> None:
    (container,) = pod_templates()[name]["spec"]["containers"]
    found = {each["name"]: each["value"] for each in container["env"]}
    assert found == cli.RAY_ENVIRONMENT


def test_the_cluster_fits_the_service() -> None:
    """Probes need no key, pods finish their requests, and there are enough of them."""
    cluster = ray_service()["spec"]["rayClusterConfig"]
    (application,) = serve_configs()["kuberay.yaml"]["applications"]
    (group,) = cluster["workerGroupSpecs"]
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] in OPEN_PATHS
    assert pod["terminationGracePeriodSeconds"] > ServeSettings().shutdown_s
    idle_s = cluster["autoscalerOptions"]["idleTimeoutSeconds"]
    assert idle_s > SCALING["downscale_delay_s"]
    assert group["maxReplicas"] == application["args"]["max_replicas"]


def test_compose_takes_its_file() -> None:
    command = [str(Path(sys.executable).with_name("check-jsonschema"))]
    command += ["--builtin-schema", "vendor.compose-spec", str(DEPLOY / "compose.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_compose_mounts_is_there() -> None:
    made = {"./keys.txt", "./metrics_key.txt", "./sdxl.pem"}
    secrets = {secret["file"] for secret in compose()["secrets"].values()}
    assert secrets == made, "the comment above says how these are made"
    for service in compose()["services"].values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert not source.startswith("./") or (DEPLOY / source).exists(), mount


def test_compose_s_container_writes_only_to_its_volumes_and_may_finish() -> None:
    service = compose()["services"]["sdxl"]
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["tmpfs"] == ["/tmp"]
    assert float(service["stop_grace_period"].removesuffix("s")) > ServeSettings().shutdown_s
    for name, each in compose()["services"].items():
        is_local = all(port.startswith("127.0.0.1:") for port in each["ports"])
        assert is_local or name == "edge"


def test_compose_s_edge_reaches_the_service_and_is_there_only_when_asked_for() -> None:
    services = compose()["services"]
    edge, (port,) = services["edge"], services["sdxl"]["ports"]
    assert edge["profiles"] == ["edge"]
    assert edge["environment"]["SDXL_ADDRESS"] == f"sdxl:{port.rpartition(':')[2]}"
    assert "${SDXL_ADDRESS-" in (DEPLOY / "haproxy.cfg").read_text()
    targets = [each["target"] for each in edge["secrets"]]
    assert all(f"crt {target}" in (DEPLOY / "haproxy.cfg").read_text() for target in targets)


def test_systemd_takes_the_unit_and_grants_it_time_to_end(tmp_path: Path) -> None:
    text = (DEPLOY / "sdxl.service").read_text()
    verified = tmp_path / "sdxl.service"
    verified.write_text(text.replace("/opt/sdxl/bin/sdxl", shutil.which("true") or ""))
    check = [tool("systemd-analyze", "systemd"), "verify", str(verified)]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    found = re.search(r"^TimeoutStopSec=(\d+)$", text, re.M)
    assert found and float(found[1]) > ServeSettings().shutdown_s + 10


def start_node(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(START_NODE), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("role", ["head", "10.0.0.1:6379"])
def test_nodes_start_with_known_flags_and_our_environment(tmp_path: Path, role: str) -> None:
    """A program in the place of `ray` prints its arguments and its environment."""
    token, fake = tmp_path / "token", tmp_path / "ray"
    token.write_text("secret")
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"; echo --; env\n')
    fake.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = start_node(role, "--num-cpus=4", PATH=path, RAY_AUTH_TOKEN_PATH=str(token))
    assert done.returncode == 0, done.stderr
    arguments, _, variables = done.stdout.partition("\n--\n")
    command, *flags = arguments.splitlines()
    environment = dict(line.split("=", 1) for line in variables.splitlines())
    assert command == "start"
    params = start.make_context("ray start", flags).params
    assert params["block"] and params["num_cpus"] == 4
    assert (params["head"], params["address"]) in [(True, None), (False, "10.0.0.1:6379")]
    assert params["dashboard_host"] in (None, "127.0.0.1")
    assert cli.RAY_ENVIRONMENT.items() <= environment.items()
    assert environment["RAY_AUTH_MODE"] == "token"


def test_no_node_starts_without_a_token(tmp_path: Path) -> None:
    for environment in ({}, {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "missing")}):
        done = start_node("head", PATH=os.environ["PATH"], **environment)
        assert done.returncode != 0 and "token" in done.stderr, done.stderr
