"""On a real GPU: engines are built, run, and make the CPU's pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import engines
from engines.cuda.device import CudaDevice, local_target
from engines.cuda.recordings import Ticks
from engines.folders.shipped import open_mini
from engines.low_rank import adapted, name_layer
from engines.pytorch.eight_bit import EightBit, attend_in_e4m3
from engines.pytorch.joined_layers import joined
from engines.trt.build import BuildSpec, build
from engines.trt.flavours import FLAVOURS, Flavour
from engines.trt.tensorrt_engine import TensorRTEngine
from engines.trt.tensorrt_loading import load_tensorrt
from sdxl.attachments import Lora
from sdxl.checkpoint import find
from sdxl.controls import Control
from sdxl.params import GenerationParams
from sdxl.picture_files import file_of
from sdxl.pipeline import Pipeline, Result, WithPictures
from tests.conftest import psnr
from tests.engines.distances import check_near
from tests.engines.eight_bit_layers import eight_bit_layer

pytestmark = [
    pytest.mark.gpu,
    # PyTorch warns of it at the first use.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
LEAST_PSNR_DB = 40.0
REQUESTS = [
    GenerationParams(prompt, seed=i, steps=8, cache_interval=interval)
    for i, prompt in enumerate(["a red circle on a blue background", "a green star"])
    for interval in (1, 2)
]


def assert_like_the_cpu(pipeline: Pipeline, mini: Pipeline) -> None:
    assert_alike(pipeline.generate(REQUESTS), mini.generate(REQUESTS))


def assert_alike(found: Sequence[Result], expected: Sequence[Result]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.image is not None and theirs.image is not None, ours.error or theirs.error
        measured = psnr(ours.image, theirs.image)
        assert measured >= LEAST_PSNR_DB, f"{measured:.1f} dB, needed {LEAST_PSNR_DB}"


@pytest.fixture
def never_waiting() -> Iterator[Callable[[], None]]:
    """After a call of the yielded function, waiting for the GPU raises an error."""
    try:
        yield lambda: torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(params=list(FLAVOURS.values()), ids=list(FLAVOURS))
def built(request: pytest.FixtureRequest, tmp_path: Path) -> Pipeline:
    flavour: Flavour = request.param
    target = local_target()
    if not flavour.is_installed:
        pytest.skip(f"{flavour.name} is not installed")
    assert target is not None
    order = BuildSpec(open_mini(), target, flavour, 4, False, tmp_path / "plans")
    return Pipeline(find("mini"), load_tensorrt(build(order), flavour))


@pytest.mark.timeout(1200)
def test_tensorrt_gives_the_pictures_of_the_cpu_from_captured_graphs(
    built: Pipeline, mini: Pipeline
) -> None:
    assert_like_the_cpu(built, mini)
    deep = built.engines["unet_deep"]
    assert isinstance(deep, TensorRTEngine)
    assert any(lane.recording.replay for lane in deep._lanes.values())


@pytest.mark.timeout(1200)
def test_a_steady_call_does_not_wait_for_the_gpu(
    built: Pipeline, never_waiting: Callable[[], None]
) -> None:
    built.generate(REQUESTS)
    deep = built.engines["unet_deep"]
    axes = {"rows": 2, "tokens": 77, "latent_h": 16, "latent_w": 16}
    inputs = {t.name: torch.zeros(t.shape(axes), device="cuda") for t in deep.spec.inputs}
    outputs = {t.name: torch.zeros(t.shape(axes), device="cuda") for t in deep.spec.outputs}
    for _ in range(2):
        deep(inputs, outputs)
    never_waiting()
    deep(inputs, outputs)


def test_what_is_captured_is_repeated_on_the_same_tensors() -> None:
    device = CudaDevice(torch.device("cuda"))
    counter = torch.zeros(1, device="cuda")
    counter.add_(0)

    def add(stream: int) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            counter.add_(1)

    replay = device.capture(add)
    assert counter.item() == 0, "a capture must not run what it records"
    for _ in range(3):
        replay()
    assert counter.item() == 3


def test_a_tick_on_the_gpu_is_replayed_and_waits_for_nothing(
    never_waiting: Callable[[], None],
) -> None:
    pipeline = engines.load("mini", "torch", device="cuda", precision="fp16")
    quick = replace(pipeline, engines=replace(pipeline.engines, calls_ahead=100))
    loop = quick.in_flight()
    params = pipeline.resolve(replace(REQUESTS[1], steps=20, width=128, height=128))
    (conditioning,) = pipeline.encode([params])
    loop.submit(pipeline.request(params, conditioning))
    for _ in range(6):
        loop.tick()
    never_waiting()
    for _ in range(6):
        loop.tick()
    torch.cuda.set_sync_debug_mode("default")
    ticks = pipeline.engines.run_recorded
    assert isinstance(ticks, Ticks)
    assert sum(r.replay is not None for r in ticks.recordings.values()) >= 2
    loop.drain()


@pytest.mark.parametrize("line", ["", "no-graphs", "no-rearranged", "attention=flash"])
def test_half_precision_paints_the_cpus_pictures_under_every_setting(
    line: str, mini: Pipeline
) -> None:
    found = engines.load("mini", "torch", device="cuda", precision="fp16", torch_options=line)
    assert_like_the_cpu(found, mini)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_loras_and_controlnets_share_a_batch_as_on_the_cpu(precision: str) -> None:
    plain, *_ = REQUESTS
    maps = {"map": file_of(Image.linear_gradient("L").resize((128, 128)).convert("RGB"))}
    control = Control("edges", "map", preprocess="canny")
    asked = [
        WithPictures(replace(plain, **fields), maps=maps)
        for fields in (
            {},
            {"loras": (Lora("outlined"),), "cache_interval": 2},
            {"loras": (Lora("outlined", 0.5), Lora("hollow", -0.5))},
            {"loras": (Lora("negative"),)},
            {"controls": (control,), "cache_interval": 2},
            {"controls": (control,), "loras": (Lora("outlined"),)},
        )
    ]
    found = engines.load("mini", "torch", device="cuda", precision=precision)
    reference = engines.load("mini", "torch", device="cpu")
    for _ in range(2):
        # The second call is replayed.
        assert_alike(found.generate(asked), reference.generate(asked))


@pytest.mark.parametrize("number", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("is_conv", [True, False])
def test_8_bit_products_are_those_of_the_cpu(number: torch.dtype, is_conv: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 64, 16, 16).to(memory_format=torch.channels_last)
    x = x if is_conv else x.permute(0, 2, 3, 1).flatten(1, 2)
    weight = torch.randint(-100, 100, (96, 3, 3, 64) if is_conv else (96, 64)).float().to(number)
    layer = EightBit(weight, torch.rand(96) / 1000, torch.full((64,), 30.0), torch.randn(96))
    expected = layer(x)
    found = layer.to("cuda")(x.cuda().half()).float().cpu()
    check_near(found, expected, 0.01)


@pytest.mark.parametrize("number", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("tokens", [112, 1000])
def test_8_bit_products_with_loras_are_those_of_the_cpu(number: torch.dtype, tokens: int) -> None:
    torch.manual_seed(0)
    layer = eight_bit_layer(128, 256, number)
    name_layer(layer, ("layer",))
    stored, residual = layer.stored(torch.randn(3, tokens, 128)), torch.randn(3, tokens, 256)
    bank = {f"layer.{side}": torch.randn(5, 16, n) / 30 for side, n in (("down", 128), ("up", 256))}
    pages, scales = torch.tensor([[1, 2], [0, 3], [4, 4]]), torch.randn(3, 2)
    with adapted(bank, pages, scales):
        expected = (
            layer.product(stored, torch.float32, residual),
            layer.transposed(stored, torch.half),
        )
    on_gpu = {name: each.cuda().half() for name, each in bank.items()}
    layer, stored = layer.to("cuda"), stored.cuda()
    with adapted(on_gpu, pages.cuda(), scales.cuda()):
        found = layer.product(stored, torch.half, residual.cuda().half())
        turned = layer.transposed(stored, torch.half)
    for ours, theirs in zip((found, turned), expected, strict=True):
        check_near(ours.cpu().float(), theirs.float(), 0.01)


@pytest.mark.parametrize("number", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("tokens", [112, 1024])
def test_attention_in_8_bits_is_that_of_the_cpu(number: torch.dtype, tokens: int) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU with a tensor memory accelerator")
    torch.manual_seed(0)
    projections = [eight_bit_layer(128, 128, number) for _ in range(3)]
    # Attention's means over many tokens are small: the usual steps of 1/25 are too coarse.
    reader = eight_bit_layer(128, 128, number, most=1.0)
    stored = projections[0].stored(torch.randn(2, tokens, 128))
    expected = attend_in_e4m3(joined(projections[:2]), projections[2], stored, 2, reader)
    query, key, value, reader = (each.to("cuda") for each in (*projections, reader))
    found = attend_in_e4m3(joined([query, key]), value, stored.cuda(), 2, reader)
    check_near(found.cpu().float(), expected.float(), 0.05)
