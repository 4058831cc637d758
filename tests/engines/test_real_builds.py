"""The real TensorRT-RTX, without a GPU, parses, builds and reports errors as the code expects.

A built plan does not prove that 8-bit kernels run. Only a timing on a GPU proves it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from engines.control_graphs import control_graph
from engines.folders.export_folder import ExportFolder
from engines.folders.manifest import spec_as_dict
from engines.folders.profiles import profiles
from engines.folders.publishing import Busy
from engines.folders.shipped import open_mini
from engines.trt import build as build_module
from engines.trt.build import build
from engines.trt.plan_worker import BuildError, run_worker
from sdxl.files import OutputError
from sdxl.specs import control_specs
from tests.engines.fake_builds import FakeWorker, order_of
from tests.engines.tiny_export import rewrite_locations, sign, write_export
from tests.sdxl.control_nets import architecture_of, random_control
from tests.waiting import wait_until

pytest.importorskip("tensorrt_rtx")
pytest.importorskip("polygraphy")
PLAN_MAGIC = b"vtrt"
LIKE_OTHERS = ("clip_l+lora", "unet_deep+locon", "unet_deep+control")
"""networks whose kinds of layers are all in others, which build faster"""


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> ExportFolder:
    return write_export(tmp_path_factory.mktemp("exports") / "half", dtype="float16")


@pytest.mark.slow
def test_all_networks_build_for_an_l40s(export: ExportFolder, tmp_path: Path) -> None:
    shares: dict[str, list[float]] = {}
    engines = build(
        order_of(export, tmp_path / "l40s"),
        lambda name, share: shares.setdefault(name, []).append(share),
    )
    assert set(engines.plans) == set(export.graphs)
    for name, plan in engines.plans.items():
        content = engines.plan_bytes(name)
        assert content[:4] == PLAN_MAGIC and plan.seconds > 0 and plan.peak_bytes > 1 << 20
        reported = shares[name]
        assert reported == sorted(reported) and len(reported) > 2 and reported[-1] == 1.0, (
            f"{name}: {reported}"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("clip_g+lora", "unet_prompt+lora", "unet_shallow+locon", "unet_shallow+control"),
        *("unet_deep+image", *(pytest.param(each, marks=pytest.mark.long) for each in LIKE_OTHERS)),
    ],
)
def test_the_embedded_models_networks_for_requests_build(name: str, tmp_path: Path) -> None:
    """The LoRAs adapt all layers, and there are embeddings."""
    order = order_of(
        open_mini(),
        tmp_path,
        has_loras="+lo" in name,
        has_controlnets="+control" in name,
        has_image_prompts="+image" in name,
    )
    run_worker(order.job(name, tmp_path / "plan"), tmp_path / "log", lambda _: None)
    assert (tmp_path / "plan").read_bytes()[:4] == PLAN_MAGIC


@pytest.mark.slow
def test_a_controlnet_builds(tmp_path: Path) -> None:
    """Its graph is the one that ONNX Runtime runs."""
    net, export = random_control(), open_mini()
    shapes = {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}
    spec = control_specs(export.arch, architecture_of(net))["control_deep"]
    made = control_graph(export.graph_bytes("unet_deep"), spec, shapes)
    assert made is not None
    model = onnx.load_model_from_string(made[0])
    for tensor in model.graph.initializer:
        if tensor.name in made[1]:
            weights = net.state_dict()[tensor.name].numpy()
            tensor.CopyFrom(onnx.numpy_helper.from_array(weights, tensor.name))
    onnx.save(model, tmp_path / "net.onnx")
    order = order_of(export, tmp_path)
    job = replace(
        order.job("unet_deep", tmp_path / "plan"),
        name=spec.name,
        onnx=str(tmp_path / "net.onnx"),
        profiles=[dict(each.ranges) for each in profiles(spec, export.arch, 4, has_exact=False)],
        spec=spec_as_dict(spec),
    )
    run_worker(job, tmp_path / "log", lambda _: None)
    assert (tmp_path / "plan").read_bytes()[:4] == PLAN_MAGIC


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda graph: os.truncate(graph, 200), "clip_g.onnx: .*parse"),
        (lambda graph: rewrite_locations(graph, "../weights.safetensors"), "clip_g.onnx: "),
        (lambda graph: rewrite_locations(graph, "gone.safetensors"), "clip_g.onnx: "),
    ],
)
def test_a_graph_that_tensorrt_cannot_read_is_named(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    export = write_export(tmp_path / "export")
    (tmp_path / "weights.safetensors").write_bytes(b"secret")
    damage(export.folder / "clip_g.onnx")
    sign(export.folder, "clip_g.onnx")
    with pytest.raises(BuildError, match=message):
        build(order_of(ExportFolder.read(export.folder), tmp_path / "l40s"))
    assert not (tmp_path / "l40s").exists()


@pytest.mark.slow
def test_a_plan_that_does_not_fit_on_the_disk_is_a_full_disk(
    export: ExportFolder, tmp_path: Path
) -> None:
    making = tmp_path / ".l40s.making"
    making.mkdir()
    (making / "clip_g.unfinished").symlink_to("/dev/full")
    with pytest.raises(OutputError, match="No space left on device"):
        build(order_of(export, tmp_path / "l40s"))
    assert not (tmp_path / "l40s").exists()


@pytest.mark.slow
def test_a_killed_build_stops_at_once_and_goes_on_later(
    export: ExportFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, making = tmp_path / "l40s", tmp_path / ".l40s.making"
    flags = ["--onnx", str(export.folder), "--gpu", "l40s", "--backend", "tensorrt-rtx"]
    command = [sys.executable, "-m", "sdxl.cli", "build", *flags, "--out", str(out)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as builder:
        try:
            wait_until(lambda: any(making.glob("*.json")), 200)
            with pytest.raises(Busy, match=f"being made by process {builder.pid}; wait"):
                build(order_of(export, out))
            wait_until(lambda: bool(children(builder.pid)))
            workers = children(builder.pid)
        finally:
            builder.kill()
    wait_until(lambda: not any(is_running(pid) for pid in workers))
    finished = {path.stem for path in making.glob("*.json")}
    assert finished and not out.exists()
    rest = FakeWorker()
    monkeypatch.setattr(build_module, "run_worker", rest)
    build(order_of(export, out))
    assert set(rest.built) == set(export.graphs) - finished


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
