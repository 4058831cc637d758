"""The TensorRT runtime's logic on a faithful double: no GPU, no library."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engines.folders.profiles import Profile, profiles
from engines.trt.tensorrt_engine import MAX_LANES, Scratch, TensorRTEngine, TensorRTError
from sdxl.engine import allocate
from sdxl.specs import ModelSpec, ShapeError, network_specs
from tests.engines.trt_double import BYTES_PER_ELEMENT, TensorRTDouble, plan_bytes
from tests.fakes import ARCH, FakeEngine

MAX_BATCH = 4
SPECS = network_specs(ARCH)


@dataclass
class Bench:
    """One engine on the double, and the tensors to call it with."""

    library: TensorRTDouble
    engine: TensorRTEngine

    def tensors(self, rows: int, side: int = 8, tokens: int = 77) -> Tensors:
        return new_tensors(self.engine.spec, rows, side, tokens)

    def run(self, tensors: Tensors) -> None:
        """Call the engine, and compare with the fake engine behind the double."""
        inputs, outputs = tensors
        for output in outputs.values():
            output.fill_(torch.nan)
        self.engine(inputs, outputs)
        expected = {name: torch.empty_like(t) for name, t in outputs.items()}
        FakeEngine(self.engine.spec)(inputs, expected)
        for name, found in outputs.items():
            assert torch.equal(found, expected[name]), name


Tensors = tuple[dict[str, Tensor], dict[str, Tensor]]


def engine_on(
    library: TensorRTDouble, name: str, scratch: Scratch | None = None, *, captures: bool = True
) -> TensorRTEngine:
    spec = SPECS[name]
    ranges = profiles(spec, ARCH, MAX_BATCH)
    plan = library.Runtime(library.Logger(2)).deserialize_cuda_engine(plan_bytes(spec, ranges))
    return TensorRTEngine(
        spec,
        plan,
        ranges,
        lambda plan: plan.create_execution_context("USER_MANAGED"),
        library.device,
        scratch or Scratch(library.device),
        captures=captures,
    )


@pytest.fixture
def bench() -> Bench:
    library = TensorRTDouble()
    return Bench(library, engine_on(library, "unet_deep"))


def new_tensors(spec: ModelSpec, rows: int, side: int, tokens: int) -> Tensors:
    axes = {"rows": rows, "latent_h": side, "latent_w": side, "tokens": tokens}
    inputs, outputs = (
        {t.name: allocate(t, axes) for t in group} for group in (spec.inputs, spec.outputs)
    )
    for tensor in inputs.values():
        tensor.copy_(torch.randn(tensor.shape))
    return inputs, outputs


def test_every_set_of_tensors_has_a_context_and_a_graph_of_its_own(bench: Bench) -> None:
    sets = [bench.tensors(rows) for rows in (2, 2, 4, 8)]
    for _ in range(4):
        for tensors in sets:
            tensors[0]["sample"].normal_()
            bench.run(tensors)
    device = bench.library.device
    assert (device.captures, device.replays, len(bench.library.contexts)) == (4, 12, 4)


def test_in_the_steady_state_nothing_waits_and_nothing_is_allocated(bench: Bench) -> None:
    tensors = bench.tensors(rows=8)
    for _ in range(2):
        bench.run(tensors)
    device = bench.library.device
    before = device.synchronized, len(device.blocks), device.captures
    for _ in range(10):
        bench.run(tensors)
    assert (device.synchronized, len(device.blocks), device.captures) == before


def test_an_engine_of_passing_tensors_captures_nothing() -> None:
    library = TensorRTDouble()
    bench = Bench(library, engine_on(library, "unet_shallow", captures=False))
    for _ in range(3):
        bench.run(bench.tensors(rows=2))
    assert bench.library.device.captures == 0
    assert len(bench.library.contexts) == 1, "one context serves all calls of one shape"


def test_deep_and_shallow_take_turns_in_one_block_of_memory() -> None:
    library = TensorRTDouble()
    scratch = Scratch(library.device)
    deep, shallow = (
        Bench(library, engine_on(library, name, scratch)) for name in ("unet_deep", "unet_shallow")
    )
    tensors = deep.tensors(rows=4), shallow.tensors(rows=4)
    for _ in range(3):
        deep.run(tensors[0])
        shallow.run(tensors[1])
    assert len(library.device.blocks) == 1


def test_a_larger_shape_grows_the_memory_and_captures_anew_what_used_the_old(bench: Bench) -> None:
    small, large = bench.tensors(rows=2), bench.tensors(rows=8, side=16)
    for tensors in (small, small, large, large, small, small):
        bench.run(tensors)
    device = bench.library.device
    sizes = [block.numel() for block in device.blocks]
    assert sizes == [BYTES_PER_ELEMENT * t[0]["sample"].numel() for t in (small, large)]
    assert device.captures == 3, "small, large, and small again on the new block"


def test_a_network_that_cannot_be_captured_runs_uncaptured(bench: Bench) -> None:
    bench.library.is_capturable = False
    tensors = bench.tensors(rows=2)
    for _ in range(3):
        bench.run(tensors)
    assert bench.library.device.captures == 0


def test_contexts_are_bounded(bench: Bench) -> None:
    sets = [bench.tensors(rows=1) for _ in range(MAX_LANES + 3)]
    for tensors in sets:
        bench.run(tensors)
    assert len(bench.engine._lanes) == MAX_LANES


@pytest.mark.parametrize(
    ("rows", "side", "tokens", "profile"),
    [(2, 8, 77, 0), (4, 8, 77, 1), (8, 8, 77, 3), (1, 8, 77, 4), (2, 16, 77, 4), (2, 8, 154, 4)],
)
def test_the_exact_profile_is_preferred(
    bench: Bench, rows: int, side: int, tokens: int, profile: int
) -> None:
    bench.run(bench.tensors(rows, side, tokens))
    assert bench.library.contexts[0]._profile == profile


@pytest.mark.parametrize(
    ("rows", "side", "tokens", "named"),
    [(16, 8, 77, "sample"), (2, 32, 77, "sample"), (2, 2, 77, "sample"), (2, 8, 308, "keys_0")],
)
def test_a_shape_outside_every_profile_is_refused_before_anything_runs(
    bench: Bench, rows: int, side: int, tokens: int, named: str
) -> None:
    inputs, outputs = bench.tensors(rows, side, tokens)
    with pytest.raises(ShapeError, match=f"unet_deep: input '{named}' has shape .* built for"):
        bench.engine(inputs, outputs)
    assert not bench.library.contexts


def test_an_output_of_another_shape_is_refused(bench: Bench) -> None:
    inputs, outputs = bench.tensors(rows=2)
    outputs["cache_past"] = torch.empty(2, 2, 8, 7)
    with pytest.raises(ShapeError, match="unet_deep: output 'cache_past' has shape .*, expected"):
        bench.engine(inputs, outputs)


def test_a_tensor_with_gaps_is_refused(bench: Bench) -> None:
    inputs, outputs = bench.tensors(rows=2)
    inputs["sample"] = inputs["sample"].to(memory_format=torch.channels_last)
    with pytest.raises(ShapeError, match="'sample' has strides .* expected a contiguous"):
        bench.engine(inputs, outputs)


def test_a_refusal_of_tensorrt_is_an_error(bench: Bench) -> None:
    bench.library.refuses = True
    with pytest.raises(TensorRTError, match="unet_deep: TensorRT refused stream"):
        bench.engine(*bench.tensors(rows=2))


def test_a_plan_of_another_network_is_refused_at_load() -> None:
    library = TensorRTDouble()
    spec, other = SPECS["unet_deep"], SPECS["unet_shallow"]
    plan = library.Runtime(library.Logger(2)).deserialize_cuda_engine(
        plan_bytes(other, [Profile({})])
    )
    with pytest.raises(TensorRTError, match="unet_deep: the plan has the tensors .*, expected"):
        TensorRTEngine(
            spec,
            plan,
            [],
            lambda plan: plan,
            library.device,
            Scratch(library.device),
            captures=True,
        )
