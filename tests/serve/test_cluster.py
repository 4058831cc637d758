"""Many devices and machines, simulated on one: in every shipped deployment, each replica has its
own device. test_several_hosts.py tests several_nodes.yaml.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve.llm.deployment import LLM, NODE
from serve.llm.names import MINI
from tests.serve.cluster_probe import KEY
from tests.serve.llm.placement_probe import DOUBLE
from tests.serve.probe_runs import report_by
from tests.serve.servers import file_of_keys
from tests.serve.services import ROOT, free_port
from tests.serve.test_deploy import serve_configs
from tests.serve.test_overlays import ray_service

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

HOST: list[dict[str, Any]] = [{"num_gpus": 8}]
HEAD, POD = {"num_gpus": 0}, {"num_gpus": 1}
LLM_POD = {"num_gpus": 1, "labels": {NODE: LLM}}
SHIPPED: list[tuple[str, list[dict[str, Any]], int, int]] = [
    ("one_host.yaml", HOST, 8, 0),
    ("one_host_llm.yaml", HOST, 7, 1),
    ("kuberay.yaml", [HEAD, POD], 1, 0),
    ("llm_pods", [HEAD, LLM_POD, POD], 1, 1),
]
"""A file or an overlay, its nodes, and the number of replicas of each model."""


def shipped(name: str, folder: Path) -> Path:
    """Return the shipped config with models, engines and paths of this machine."""
    is_file = name.endswith(".yaml")
    text = "" if is_file else ray_service(name)["spec"]["serveConfigV2"]
    config = serve_configs()[name] if is_file else yaml.safe_load(text)
    args = config["applications"][0]["args"]
    args |= {"model": "mini", "backend": "onnxruntime", "precision": ""}
    args |= {"keys": file_of_keys(folder, **{KEY: "me"}), "results_dir": str(folder / "results")}
    if args["llm"] != "none":
        args |= {"llm": str(MINI), "llm_python": sys.executable}
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.mark.parametrize(("name", "nodes", "images", "llms"), SHIPPED)
def test_every_shipped_config_gives_each_replica_a_gpu_of_its_own(
    tmp_path: Path, name: str, nodes: list[dict[str, Any]], images: int, llms: int
) -> None:
    report = report_by(
        "tests.serve.cluster_probe",
        *(str(free_port()), json.dumps(nodes), str(shipped(name, tmp_path))),
        begins='{"images"',
        PYTHONPATH=f"{ROOT}:{DOUBLE}",
    )
    assert (len(report["images"]), len(report["llm"])) == (images, llms)
    assert report["pictures"] == 10
    if nodes == HOST:
        assert sorted(report["images"] + report["llm"]) == [str(i) for i in range(8)]
    else:
        assert len(set(report["image_nodes"])) == images
        assert not any(report["nodes"][node] for node in report["image_nodes"]), "not the LLM's"
