"""The forms of our kernels are a closed list that covers every size. They are compiled ahead."""

from __future__ import annotations

import logging
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes for Linux alone")

import triton
from safetensors.torch import save_file
from triton.backends.compiler import GPUTarget

from engines.pytorch import forms, torch_engine
from engines.pytorch.eight_bit import put_control_layers
from engines.pytorch.fast_unet import rearrange
from engines.pytorch.forms import (
    Form,
    compile_form,
    compiled_ahead,
    compiled_forms,
    count_compilations,
    form_of,
    forms_of,
    is_cached,
    recorded_launches,
)
from engines.pytorch.launches import FUSION, Launch, meta_inputs, noted
from engines.pytorch.slots import slot_of
from engines.pytorch.tiles import KIB, Tiles
from engines.pytorch.torch_options import TorchOptions
from eval.gpu.mixed import OFFICIAL
from eval.measuring.arithmetic import FULL_SIZE, architecture_of, configs_of
from eval.speed.meta_networks import UNETS, decoder, half_unet, numbers_of, unets
from sdxl.checkpoint import find
from sdxl.networks.attention import cross_attentions
from sdxl.networks.control import control_networks, net_like
from sdxl.specs import CHUNK, ControlArchitecture, control_specs, level_axes, network_specs
from tests.engines.meta_launches import launches_in_slots, launches_of

TARGET = GPUTarget("cuda", 90, 32)
HOPPER = Tiles(227 * KIB)
FREE = ((1000, 1000), (1080, 1048), (720, 1280), (1080, 1920), (536, 968))
MOST_FORMS = 100
ROOT = Path(__file__).parents[3]
ARCH = architecture_of(configs_of(FULL_SIZE))
SPECS = network_specs(ARCH, "float16")


@pytest.fixture(scope="module")
def closed() -> set[Form]:
    networks = {**unets("fp8"), "vae_decoder": decoder("fp8")}
    launches = recorded_launches(networks, SPECS, ARCH, has_slots=True)
    return set(forms_of(launches, TARGET, HOPPER.fitting))


def in_slot(name: str, size: tuple[int, int], rows: int) -> list[Launch]:
    slot = slot_of(size[0] // 8, size[1] // 8, 128)
    assert slot is not None
    return launches_in_slots(name, "fp8", rows, slot)


def launched(name: str, size: tuple[int, int], rows: int, chunks: int) -> list[Launch]:
    axes = {"rows": rows, "tokens": CHUNK * chunks, "batch": 1}
    axes |= {"latent_h": size[0] // 8, "latent_w": size[1] // 8}
    network = decoder("fp8") if name == "vae_decoder" else unets("fp8")[name]
    with torch.inference_mode(), noted() as launches:
        network(*meta_inputs(SPECS[name], axes))
    return launches


def test_the_list_is_short_and_covers_all_tiles(closed: set[Form]) -> None:
    assert len(closed) <= MOST_FORMS
    tiles = {tuple(f.constants[k] for k in "MNK") for f in closed if f.kernel == "_tma_product"}
    assert len(tiles) == 5 + 4, "in 8 bits and in halves"


@pytest.mark.slow
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
def test_every_size_bucket_and_prompt_has_its_forms_in_the_list(
    closed: set[Form], every: int
) -> None:
    assert len(OFFICIAL) == 41
    buckets = (1, *range(2, 17, 2))
    for index, size in enumerate((*OFFICIAL, *FREE)[::every]):
        rows, chunks = buckets[index % len(buckets)], 1 + index % 3
        for name in (*UNETS, "unet_prompt", "vae_decoder"):
            found = {form_of(launch, TARGET) for launch in launched(name, size, rows, chunks)}
            new = [(form.kernel, form.signature, form.constants) for form in found - closed]
            assert not new, f"{name} at {size}, {rows} rows, {chunks} chunks: {new}"


@pytest.mark.slow
def test_slots_have_their_forms_in_the_list(closed: set[Form]) -> None:
    """This holds for slots of any size; the official sizes share one slot."""
    sizes = ((832, 1216), (512, 512), (768, 768), (1536, 1536), (1920, 1088))
    for size, rows in zip(sizes, (16, 1, 6, 2, 10), strict=True):
        for name in UNETS:
            found = {form_of(launch, TARGET) for launch in in_slot(name, size, rows)}
            new = [(form.kernel, form.signature, form.constants) for form in found - closed]
            assert not new, f"{name} at {size}, {rows} rows: {new}"
    shared = [slot_of(height // 8, width // 8, 128) for height, width in OFFICIAL]
    assert shared.count(128**2) == 40 and shared.count(None) == 1


def test_loading_lists_the_forms_without_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listed: list[Any] = []
    monkeypatch.setattr(forms, "compiled_ahead", listed.append)
    monkeypatch.setattr(forms, "target_of", lambda _: TARGET)
    mini, meta = find("mini"), torch.device("meta")
    specs = network_specs(mini.arch, "float16")
    numbers = tmp_path / "numbers.safetensors"
    save_file(dict(numbers_of(mini.part("unet"), "fp8")), numbers)
    settings: Any = {"specs": specs, "cut": "reference", "options": TorchOptions()}
    placed = partial(torch_engine._place_part, **settings, numbers=[numbers])
    fit = partial(torch_engine._fit_control, options=TorchOptions(), numbers=[numbers])
    torch_engine._compile_ahead(mini, meta, specs, TorchOptions(), placed, fit)
    found, target = listed[0]()
    networks = {**unets("fp8", "mini"), "vae_decoder": decoder("fp8", "mini")}
    launches = recorded_launches(networks, specs, mini.arch)
    with torch.device("meta"):
        net = net_like(half_unet("mini"), "float16")
        widths = tuple(each.to_k.out_features for each in cross_attentions(net))
        put_control_layers(net, numbers)
        rearrange(net)
    deep, own = control_networks(net)["control_deep"], ControlArchitecture(widths)
    axes = {"rows": 4, "tokens": 2 * CHUNK, **level_axes(16, 16)}
    given = meta_inputs(control_specs(mini.arch, own, "float16")["control_deep"], axes)
    with torch.inference_mode(), noted() as of_a_net:
        deep(*given)
    expected = forms_of([*launches, *of_a_net], TARGET, Tiles(99 * KIB).fitting)
    assert target == TARGET
    assert set(expected) <= set(found)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launch:
    """A launch that compiles quickly, with an empty cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    launches = launches_of("unet_shallow", "fp8", 2)
    return next(launch for launch in launches if launch.name == "_fold_norm")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name another GPU, on which nothing is launched."""
    named: Any = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: TARGET,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", named)


@pytest.mark.slow
def test_a_kernel_has_the_same_key_in_every_process() -> None:
    """The order of the launches does not matter."""
    code = (
        "import sys\nfrom triton import JITFunction\n"
        "from engines.pytorch import triton_kernels, triton_product\n"
        "both = {**vars(triton_kernels), **vars(triton_product)}\n"
        "ours = sorted(name for name in both if isinstance(both[name], JITFunction))\n"
        "keys = {name: both[name].cache_key for name in ours[:: int(sys.argv[1])]}\n"
        "print(sorted(keys.items()))"
    )
    keys = {
        subprocess.check_output([sys.executable, "-c", code, step], cwd=ROOT)
        for step in ("1", "-1")
    }
    assert len(keys) == 1, keys


@pytest.mark.usefixtures("driver")
def test_a_launch_finds_what_was_compiled_ahead(small: Launch) -> None:
    count_compilations()
    form, before = form_of(small, TARGET), compiled_forms()
    assert not is_cached(form, TARGET)
    compile_form(form, TARGET)
    assert is_cached(form, TARGET)
    assert compiled_forms() == before + 1
    small.kernel.device_caches.clear()
    # Everything that a launch does before it starts the kernel.
    small.kernel.warmup(*small.arguments, grid=small.grid, **FUSION, **small.constants)
    assert compiled_forms() == before + 1, "the launch compiled another form"


@pytest.mark.slow
def test_other_processes_compile_ahead_and_a_failure_is_logged(
    small: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    form = form_of(small, TARGET)
    broken = Form("none", form.module, "_no_such_kernel", {}, {}, {}, {})
    with caplog.at_level(logging.INFO), compiled_ahead(lambda: ([form], TARGET)):
        pass
    assert is_cached(form, TARGET)
    assert "compiling kernels: 1 of 1" in caplog.text
    for wrong in (lambda: ([broken], TARGET), lambda: 1 / 0):
        caplog.clear()
        with compiled_ahead(wrong):  # type: ignore[arg-type]
            pass
        assert "compiled at their first use" in caplog.text
