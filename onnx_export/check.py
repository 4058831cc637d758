"""Checks that an export computes the same as the model: every graph against torch, then pictures.

ONNX Runtime runs the graphs on the CPU; a note says which arithmetic this covers. PyTorch's backend
has more layers in 8 bits, and findings of its own.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from torch import Tensor

from engines.folders.export_folder import IN_TORCH, ExportFolder, changed_file
from engines.lora import load_parts
from engines.onnxruntime_engine import load_onnxruntime, session_options, threads
from engines.parity.calls import EngineCall, StepError, record_calls, step_errors, worst
from engines.parity.findings import (
    EIGHT_BIT_NETWORKS,
    PICTURE_BOUNDS,
    STEP_BOUNDS,
    CheckFailed,
    Finding,
    broken,
    largest_difference,
    median_psnr,
    picture_findings,
    relative_norm,
)
from engines.parity.pictures import (
    EIGHT_BIT_WORK,
    WORK,
    Subject,
    clip_score,
    paint,
    step_seconds,
    subject_of,
)
from engines.pytorch.torch_engine import load_torch
from engines.pytorch.torch_options import TorchOptions
from onnx_export.export_spec import ExportSpec
from onnx_export.exporter import Say
from onnx_export.recipes import RECIPES
from onnx_export.reference import fake_quantise, torch_engines
from sdxl import schedulers
from sdxl.checkpoint import NETWORK_FOLDERS
from sdxl.engine import Engine, Engines, call, torch_dtype
from sdxl.memory import give_back
from sdxl.params import GenerationParams
from sdxl.specs import Architecture, ModelSpec, image_axes

AXES = (
    {"rows": 2, "batch": 2, "chunks": 2, "latent_h": 16, "latent_w": 16, "tokens": 77},
    {"rows": 3, "batch": 1, "chunks": 5, "latent_h": 17, "latent_w": 22, "tokens": 154},
    {"rows": 1, "batch": 1, "chunks": 1, "latent_h": 8, "latent_w": 12, "tokens": 77},
)
"""an even square, an odd shape with several chunks, and a single row"""

GRAPH_BOUNDS = {"fp32": 1e-4, "fp16": 0.01, "int8": 0.05, "fp8": 0.08}
"""fp32: the largest difference, relative to the largest value if that is above 1. Others: relative
L2. 8-bit UNets are compared with the same rounding in torch, where a value near the middle of two
steps may be rounded the other way, which changes all later values."""
SHIFT, SHIFTS, SCATTER_SHARE = 1e-6, 3, 1.5
"""The scatter is the effect of such rounding: the largest difference in torch over SHIFTS tries in
which the sample is shifted by SHIFT (0.07 for a random SDXL, docs/log.md). A graph may differ by
SCATTER_SHARE times the scatter if that is more than the bound above."""
SCORE_BOUND = 0.005
STEPPED = 2
"""pictures whose calls are kept; their caches take memory"""
SMALLEST = "unet_shallow"
"""the graph whose inserted casts are counted; a copy of a full-size Deep would take gigabytes"""
INSERTED = "InsertedPrecisionFreeCast"

Caller = Callable[[Engine, Architecture, Mapping[str, Tensor]], dict[str, Tensor]]


def check(
    export: ExportFolder, order: ExportSpec, say: Say = print, subject: Subject | None = None
) -> dict[str, Any]:
    """Return all findings for export.json. Raise CheckFailed if one is outside its bound."""
    run = _Run(export, order, subject or subject_of(order.checkpoint))
    findings = _report(run.findings(), say)
    if run.note:
        say(run.note)
    if wrong := broken(findings):
        raise CheckFailed(f"{order.out}: {wrong}")
    in_torch = _report(run.findings_in_torch(), say)
    return {
        "findings": [asdict(f) for f in findings],
        "note": run.note,
        # PyTorch's findings do not prevent the publication of good graphs.
        IN_TORCH: {"findings": [asdict(f) for f in in_torch], "note": broken(in_torch)},
        "painted": {**run.subject.painted, "interval": run.subject.interval},
        "step_errors": [asdict(error) for error in run.errors],
    }


def _report(findings: Iterable[Finding], say: Say) -> list[Finding]:
    """Print each finding as soon as it is made, and return all."""
    reported = []
    for finding in findings:
        say(finding.line)
        reported.append(finding)
    return reported


@dataclass(frozen=True)
class ReferencePictures:
    """The model's pictures with the served plan, and exact ones."""

    served: Tensor
    exact: Tensor
    calls: list[EngineCall]
    """the UNet's calls with the served plan"""


@dataclass
class _Run:
    """One check. Torch runs first and is freed before the graphs are loaded, so that a full-size
    model is not in memory twice."""

    export: ExportFolder
    order: ExportSpec
    subject: Subject
    note: str = ""
    errors: list[StepError] = field(default_factory=list)
    """errors of each UNet call of the kept pictures"""
    kept: ReferencePictures | None = None

    @property
    def is_quantised(self) -> bool:
        return self.export.precision in RECIPES

    @property
    def is_in_torch(self) -> bool:
        """True if PyTorch's backend uses the export's numbers: for 8 bits without LoRAs."""
        return self.is_quantised and not self.order.loras

    @property
    def painted(self) -> int:
        scored = self.subject.scored if self.is_quantised else 0
        return max(self.subject.compared, scored)

    def findings(self) -> Iterator[Finding]:
        whole = self.torch(*NETWORK_FOLDERS)
        checkpoint = self.order.checkpoint
        if self.subject.budget_s < math.inf:
            step_s = step_seconds(checkpoint, whole, self.subject)
            work = WORK + EIGHT_BIT_WORK if self.is_in_torch else WORK
            self.subject = self.subject.fitted(step_s, work)
        expected, reference = self.outputs(whole, row_by_row), self.reference(whole)
        self.kept = reference
        del whole
        give_back()
        scatter: dict[str, float] = {}
        if self.is_quantised:
            rounded = self.torch("unet")
            expected |= self.outputs(rounded, row_by_row)
            scatter = self.scatter(rounded, expected)
            del rounded
            give_back()
        if self.export.precision != "fp32":
            self.note = half_coverage(self.export)
        graphs = load_onnxruntime(self.export)
        outputs = self.outputs(graphs)
        for name in self.export.graphs:
            yield self.compared(name, outputs[name], expected[name], scatter.get(name, 0.0))
        self.errors = self.step_errors(graphs, reference.calls)
        yield self.compared_steps(self.errors)
        yield from self.compared_pictures(graphs, reference)

    def findings_in_torch(self) -> Iterator[Finding]:
        """Compare PyTorch's 8 bits. A CPU multiplies the rounded numbers in float32."""
        if self.kept is None or not self.is_in_torch:
            return
        give_back()
        engines = load_torch(
            self.order.checkpoint,
            device="cpu",
            precision=self.export.precision,
            cut=self.export.cut,
            options=TorchOptions(),
            numbers=self.export.numbers,
        )
        subject, served = self.subject, self.kept.served
        steps = self.compared_steps(self.step_errors(engines, self.kept.calls))
        pictures = paint(self.order.checkpoint, engines, subject, subject.compared)
        for each in (steps, *self.compared_served(pictures, served[: subject.compared])):
            yield replace(each, what=f"in PyTorch: {each.what}")

    def reference(self, whole: Engines) -> ReferencePictures:
        checkpoint, subject = self.order.checkpoint, self.subject
        recorder, calls = record_calls(whole, *EIGHT_BIT_NETWORKS)
        stepped = min(STEPPED, subject.compared)
        pictures = [paint(checkpoint, recorder, subject, stepped)]
        if self.painted > stepped:
            pictures.append(paint(checkpoint, whole, subject, self.painted, first=stepped))
        exact = paint(checkpoint, whole, subject, subject.compared, interval=1)
        return ReferencePictures(torch.cat(pictures), exact, calls)

    def torch(self, *names: str) -> Engines:
        checkpoint = self.order.checkpoint
        parts = load_parts(checkpoint, self.order.loras, *names)
        if self.is_quantised and names == ("unet",):
            fake_quantise(parts["unet"], self.export.folder / changed_file("unet"))
        return torch_engines(checkpoint, parts, self.export.cut)

    def outputs(
        self, engines: Engines, caller: Caller = call
    ) -> dict[str, list[dict[str, Tensor]]]:
        """Call each network at all AXES."""
        vocabulary = min(
            self.order.checkpoint.config(part)["vocab_size"]
            for part in ("text_encoder", "text_encoder_2")
        )
        results: dict[str, list[dict[str, Tensor]]] = {}
        for name, engine in engines.by_name.items():
            spec = self.export.graphs[name].spec
            results[name] = []
            for axes in AXES:
                sides = image_axes(self.export.arch, axes["latent_h"], axes["latent_w"])
                inputs = example_inputs(spec, axes | sides, self.export.arch, vocabulary)
                dtypes = {t.name: torch_dtype(t) for t in engine.spec.inputs}
                cast = {n: value.to(dtypes[n]) for n, value in inputs.items()}
                results[name].append(caller(engine, self.export.arch, cast))
        return results

    def scatter(
        self, rounded: Engines, expected: Mapping[str, list[dict[str, Tensor]]]
    ) -> dict[str, float]:
        """Return how much each 8-bit UNet's rounding amplifies a tiny shift."""
        tries = [self.outputs(rounded, partial(shift_sample, seed)) for seed in range(SHIFTS)]
        return {
            name: max(worst_difference(shifted[name], expected[name]) for shifted in tries)
            for name in EIGHT_BIT_NETWORKS
        }

    def compared(
        self,
        name: str,
        outputs: list[dict[str, Tensor]],
        expected: list[dict[str, Tensor]],
        scatter: float = 0.0,
    ) -> Finding:
        spec = self.export.graphs[name].spec
        is_eight_bit = self.is_quantised and name in EIGHT_BIT_NETWORKS
        is_whole = spec.outputs[0].dtype == "float32"
        precision = self.export.precision if is_eight_bit else "fp32" if is_whole else "fp16"
        measure = largest_difference if precision == "fp32" else relative_norm
        difference = worst_difference(outputs, expected, measure)
        bound = max(GRAPH_BOUNDS[precision], SCATTER_SHARE * scatter)
        return Finding(f"{name}, {precision}", difference, bound)

    def step_errors(self, engines: Engines, calls: list[EngineCall]) -> list[StepError]:
        usual = GenerationParams().scheduler
        table = schedulers.table(usual, self.subject.steps, self.order.checkpoint.scheduler)
        return step_errors(engines, calls, table)

    def compared_steps(self, errors: list[StepError]) -> Finding:
        what = f"picture expected at {len(errors)} steps, relative L2, worst"
        return Finding(what, worst(e.picture for e in errors), STEP_BOUNDS[self.export.precision])

    def compared_served(self, pictures: Tensor, served: Tensor) -> Iterable[Finding]:
        bound = PICTURE_BOUNDS[self.export.precision]
        return picture_findings(pictures, served, bound, self.subject.steps)

    def compared_pictures(self, graphs: Engines, reference: ReferencePictures) -> Iterator[Finding]:
        checkpoint, subject, precision = self.order.checkpoint, self.subject, self.export.precision
        count, interval = subject.compared, subject.interval
        painted = paint(checkpoint, graphs, subject, self.painted)
        served, exact = reference.served[:count], reference.exact
        yield from self.compared_served(painted[:count], served)
        # Together, errors of the cache and of 8 bits may exceed their sum: report each alone too.
        alone = paint(checkpoint, graphs, subject, count, interval=1)
        for what, pictures in (
            (f"{precision} alone", alone),
            (f"interval {interval} alone", served),
            (f"{precision} and interval {interval}", painted[:count]),
        ):
            yield Finding(f"{what}, PSNR to the exact model", median_psnr(pictures, exact))
        if self.is_quantised and (scored := subject.scored):
            prompts = subject.prompts[:scored]
            both = painted, reference.served
            scores = [clip_score(images[:scored], prompts) for images in both]
            what = f"CLIP score of {scored} pictures, change"
            yield Finding(what, abs(scores[0] / scores[1] - 1), SCORE_BOUND)


def worst_difference(
    outputs: list[dict[str, Tensor]],
    expected: list[dict[str, Tensor]],
    measure: Callable[[Tensor, Tensor], float] = relative_norm,
) -> float:
    return worst(
        measure(graph[name].float(), torch_output)
        for graph, reference in zip(outputs, expected, strict=True)
        for name, torch_output in reference.items()
    )


def shift_sample(
    seed: int, engine: Engine, arch: Architecture, inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shifted = {
        name: value * (1 + SHIFT * torch.randn(value.shape, generator=generator))
        if name == "sample"
        else value
        for name, value in inputs.items()
    }
    return row_by_row(engine, arch, shifted)


def row_by_row(
    engine: Engine, arch: Architecture, inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Call an engine row by row. With several rows, PyTorch's GroupNorm on a CPU loses two digits:
    7e-5 of the embedded VAE's values instead of 1e-6."""
    rows = next(iter(inputs.values())).shape[0]
    results = [
        call(engine, arch, {name: value[i : i + 1] for name, value in inputs.items()})
        for i in range(rows)
    ]
    return {name: torch.cat([result[name] for result in results]) for name in results[0]}


def example_inputs(
    spec: ModelSpec, axes: Mapping[str, int], arch: Architecture, vocabulary: int
) -> dict[str, Tensor]:
    """Return random inputs, by a seed, of the size of a request's values."""
    generator = torch.Generator().manual_seed(sum(axes.values()))
    inputs = {}
    for tensor in spec.inputs:
        shape, dtype = tensor.shape(axes), torch_dtype(tensor)
        if not dtype.is_floating_point:
            value = torch.randint(vocabulary, shape, generator=generator)
        elif tensor.name == "timestep":
            value = torch.linspace(999.0, 1.5, *shape)
        elif tensor.name == "time_ids":
            side = arch.default_side
            value = torch.tensor([side, side, 0, 0, side, side]).expand(shape)
        else:
            value = torch.randn(shape, generator=generator)
        inputs[tensor.name] = value.to(dtype)
    return inputs


def half_coverage(export: ExportFolder) -> str:
    """Describe how much half-precision arithmetic the check covers on a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        options = session_options(threads())
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        path = export.folder / export.graphs[SMALLEST].file
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        model = onnx.load(options.optimized_model_filepath, load_external_data=False)
    casts = sum(node.name.startswith(INSERTED) for node in model.graph.node)
    if not casts:
        return "ONNX Runtime ran the half-precision graphs in halves"
    return (
        f"ONNX Runtime put {casts} casts to float32 into {SMALLEST}: the figures cover the "
        "rounding of weights, inputs and outputs to halves, not arithmetic in halves"
    )
