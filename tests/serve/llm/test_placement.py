"""Both models on one simulated cluster of GPUs: the GPUs of each, and the cost of a kill."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from sdxl.params import InvalidParams
from serve.llm import deployment
from serve.replica_deployment import replicas_of
from serve.settings import ServeSettings
from tests.serve.llm.placement_probe import DOUBLE
from tests.serve.probe_runs import report_by
from tests.serve.services import ROOT, free_port


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_eight_gpus_are_given_once_and_kills_on_both_sides_are_recovered(tmp_path: Path) -> None:
    options = tmp_path / "options.toml"
    options.write_text("tensor_parallel_size = 2\nmax_seq_len = 256\n")
    report = report_by(
        "tests.serve.llm.placement_probe",
        *(str(options), str(free_port())),
        begins='{"images"',
        timeout_s=900,
        # Replicas find the double there, like TensorRT-LLM in its interpreter.
        PYTHONPATH=f"{ROOT}:{DOUBLE}",
    )
    groups = [set(devices.split(",")) for devices in (*report["images"], *report["llm"])]
    assert [len(g) for g in groups] == [1, 1, 1, 1, 2, 2], report
    assert len(set().union(*groups)) == 8, f"a GPU was given twice: {report}"
    for path, counts in report["statuses"].items():
        assert set(counts) == {"200"}, f"{path}: {counts}"
    assert set(report["after"].values()) == {200}


def settings(tmp_path: Path, text: str, **rest: Any) -> ServeSettings:
    (tmp_path / "options.toml").write_text(text)
    return ServeSettings(llm="m", llm_options=str(tmp_path / "options.toml"), **rest)


@pytest.fixture
def nodes_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[dict[str, Any]] = [
        {"Alive": True, "Resources": {"GPU": 4.0}, "Labels": {"sdxl": "llm"}},
        {"Alive": True, "Resources": {"GPU": 4.0}, "Labels": {}},
        {"Alive": True, "Resources": {}, "Labels": {}},
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)


def test_a_group_has_the_gpus_of_one_node(nodes_of_four: None, tmp_path: Path) -> None:
    asked = settings(tmp_path, "tensor_parallel_size = 2\npipeline_parallel_size = 2\n")
    taken, _ = deployment.place_llm(asked, 8)
    options = deployment.on_gpus(4, replace(asked, llm_python="/opt/trtllm/bin/python"))
    assert taken == 4 and options["placement_group_strategy"] == "STRICT_PACK"
    assert options["placement_group_bundles"] == [{"CPU": 1, "GPU": 4}]
    assert options["ray_actor_options"]["runtime_env"]["py_executable"] == "/opt/trtllm/bin/python"


@pytest.mark.parametrize(
    ("text", "replicas", "most", "named"),
    [
        ("tensor_parallel_size = 8", 1, 0, "must fit on one node, got '"),
        ("tensor_parallel_size = 4", 2, 0, "llm_replicas.*images need one"),
        ("tensor_parallel_size = 4", 1, 2, "llm_max_replicas.*images need one"),
        ("tensor_paralel_size = 4", 1, 0, "tensor_paralel_size"),
    ],
)
def test_models_that_do_not_fit_the_gpus_are_refused(
    nodes_of_four: None, tmp_path: Path, text: str, replicas: int, most: int, named: str
) -> None:
    counts = {"llm_replicas": replicas, "llm_max_replicas": most}
    with pytest.raises(InvalidParams, match=named):
        deployment.place_llm(settings(tmp_path, text, **counts), 8)


def test_images_get_the_gpus_that_the_llm_leaves(nodes_of_four: None, tmp_path: Path) -> None:
    growing = settings(tmp_path, "tensor_parallel_size = 2\n", llm_max_replicas=3)
    taken, bound = deployment.place_llm(growing, 8)
    scaling = bound._bound_deployment._deployment_config.autoscaling_config
    assert taken == 6 and (scaling.min_replicas, scaling.max_replicas) == (1, 3)


def test_images_on_the_cpu_leave_every_gpu_to_the_llm(nodes_of_four: None, tmp_path: Path) -> None:
    text = "tensor_parallel_size = 4\n"
    taken, _ = deployment.place_llm(settings(tmp_path, text, llm_replicas=2, device="cpu"), 8)
    assert taken == 8
    with pytest.raises(InvalidParams, match="at most 8 of the cluster's 8 GPUs"):
        deployment.place_llm(settings(tmp_path, text, llm_replicas=3, device="cpu"), 8)


def test_a_llm_apart_takes_the_labelled_nodes(nodes_of_four: None, tmp_path: Path) -> None:
    asked = settings(tmp_path, "tensor_parallel_size = 4\n", llm_replicas=2, llm_apart=True)
    taken, _ = deployment.place_llm(asked, 8)
    assert taken == 4, "a second node may come later"
    options = deployment.on_gpus(4, asked)
    assert options["placement_group_bundle_label_selector"] == [{"sdxl": "llm"}]
    images = replicas_of(asked, "ImageReplica", 4, True, 4).ray_actor_options
    assert images is not None and images["label_selector"] == {"sdxl": "!llm"}


def test_a_growing_cluster_may_have_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    head = {"Alive": True, "Resources": {"CPU": 2.0}, "Labels": {}}
    monkeypatch.setattr(ray, "nodes", lambda: [head])
    given = {"llm_backend": "tensorrt-llm", "llm_replicas": 2}
    assert deployment.place_llm(settings(tmp_path, "", device="gpu", **given), 0)[0] == 2
    with pytest.raises(InvalidParams, match="must fit on one node, got '"):
        deployment.place_llm(settings(tmp_path, "", **given), 0)


def test_the_embedded_model_and_none_take_no_gpu() -> None:
    assert deployment.place_llm(ServeSettings(), 8)[0] == 0
    assert deployment.place_llm(ServeSettings(llm="none"), 8) == (0, None)
