"""`sdxl build`: builds engines for a kind of GPU from an export.

An 8-bit plan may run kernels of another type: TensorRT chooses the faster kernels, and tensorrt-rtx
documents INT8 for weights only. Only timing on the GPU shows which kernels run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engines.folders.export_folder import PRECISIONS
from engines.folders.targets import LOCAL, TARGETS, named_target
from engines.run_built import pictures_of, run_built
from engines.trt.flavours import FLAVOURS
from sdxl.arguments import MODEL, Parser, add_lora_flag, add_option, whole
from sdxl.params import InvalidParams

if TYPE_CHECKING:
    from engines.folders.engine_folder import EngineFolder
    from engines.folders.export_folder import ExportFolder
    from engines.folders.targets import Target
    from engines.lora import LoraFile
    from engines.parity.proof import Proof
    from engines.trt.build import BuildSpec, OnProgress


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    if not (options.onnx or options.model):
        raise InvalidParams("onnx", None, "must be a folder of `sdxl export`, or give --model")
    if options.gpu != LOCAL:
        named_target(options.gpu)
    # Imported late: an error in a flag appears before PyTorch is loaded.
    from engines.parity.proof import not_run
    from engines.trt.build import build

    order = read_order(options)
    loras = read_loras(options.lora, order.export)

    def prove(folder: EngineFolder) -> Proof:
        if options.unchecked:
            return not_run("built with --unchecked")
        return run_built(folder, order, options.model, loras)

    with show_progress(order) as on_progress:
        engines = build(order, on_progress, prove)
    print(summary(engines))
    return 0


def build_parser() -> Parser:
    parser = Parser(prog="sdxl build", description="Build TensorRT engines from an export.")
    add = partial(add_option, parser)
    add("--onnx", None, "a folder of `sdxl export` (default: the model's place)", "DIR")
    add("--model", None, f"{MODEL}: its export is built, and the plans are compared with it")
    text = "a LoRA of the export; the plans are compared with the model and its LoRAs"
    add_lora_flag(parser, text)
    text = f"the export's precision, if --onnx is not given: {', '.join(PRECISIONS)}"
    add("--precision", None, text)
    add("--gpu", LOCAL, f"the GPU to build for: {', '.join(TARGETS)}, {LOCAL}")
    add("--backend", "tensorrt", ", ".join(FLAVOURS))
    add("--max-batch", None, "images in one call (default: the GPU's)", "N", type=whole)
    text = "also build networks that apply requests' LoRAs; about doubles the plans' size"
    add("--request-loras", False, text)
    text = "also build UNets that add requests' ControlNets; about doubles the plans' size"
    add("--request-controlnets", False, text)
    text = "also build UNets that attend to requests' image prompts; about doubles the plans' size"
    add("--request-image-prompts", False, text)
    add("--sparse", False, "use kernels for 2:4 sparse weights if the weights are sparse")
    add("--out", None, "folder for the engines (default: where `auto` looks for them)", "DIR")
    text = "do not compare the plans with the model; serving them needs --unchecked too"
    add("--unchecked", False, text)
    return parser


def read_order(options: argparse.Namespace) -> BuildSpec:
    from engines.cuda.device import local_target
    from engines.folders.export_folder import ExportFolder
    from engines.folders.places import plans_place
    from engines.trt.build import BuildSpec
    from engines.trt.flavours import check_buildable, flavour_named

    flavour, local = flavour_named(options.backend), local_target()
    target = chosen_target(options.gpu, local)
    check_buildable(flavour, target, local)
    flavour.load()
    max_batch = target.max_batch if options.max_batch is None else options.max_batch
    if not 1 <= max_batch <= target.max_batch:
        raise InvalidParams(
            "max-batch", max_batch, f"must be 1 to {target.max_batch} on a {target.name}"
        )
    export = ExportFolder.open(export_folder(options, target), verify=True)
    if export.loras and not options.out:
        # The default place is for engines of the model without LoRAs.
        raise InvalidParams("out", None, "must be a folder for engines with LoRAs in them")
    place = plans_place(export.model, export.model_digest, export.precision, export.cut)
    out = Path(options.out).absolute() if options.out else place / f"{target.key}-{flavour.name}"
    return BuildSpec(
        export,
        target,
        flavour,
        max_batch,
        options.sparse,
        out,
        has_loras=options.request_loras,
        has_controlnets=options.request_controlnets,
        has_image_prompts=options.request_image_prompts,
    )


def export_folder(options: argparse.Namespace, target: Target) -> Path:
    if options.onnx:
        return Path(options.onnx)
    from engines.folders.digests import model_digest
    from engines.folders.places import export_place
    from sdxl.checkpoint import find

    precision = options.precision or target.precision
    if precision not in PRECISIONS:
        raise InvalidParams.unknown("precision", precision, PRECISIONS)
    checkpoint = find(options.model)
    return export_place(checkpoint.name, model_digest(checkpoint), precision)


def read_loras(named: Sequence[str], export: ExportFolder) -> tuple[LoraFile, ...]:
    """Check that the LoRAs are the export's, before an hour of building."""
    from engines.lora import LoraFile

    loras = tuple(LoraFile.parse(text) for text in named)
    if loras and [lora.as_dict() for lora in loras] != list(export.loras):
        needed = f"must be the export's LoRAs, in their order: {list(export.loras) or 'none'}"
        raise InvalidParams("lora", ", ".join(named), needed)
    return loras


def chosen_target(name: str, local: Target | None) -> Target:
    if name != LOCAL:
        return named_target(name)
    if local is None:
        raise InvalidParams(
            "gpu", name, f"must be one of {', '.join(TARGETS)}: there is no NVIDIA GPU here"
        )
    return local


@contextmanager
def show_progress(order: BuildSpec) -> Iterator[OnProgress]:
    """Show a bar for each plan on a terminal, otherwise a line."""
    from tqdm import tqdm

    bars: dict[str, tqdm] = {}
    is_terminal = sys.stderr.isatty()

    def on_progress(name: str, share: float) -> None:
        if name not in bars:
            if not is_terminal:
                print(f"{name}: building for {order.target.name}", file=sys.stderr)
            form = "{desc:<14}{percentage:3.0f}%|{bar}| {elapsed}"
            bars[name] = tqdm(
                desc=name, total=1.0, bar_format=form, file=sys.stderr, disable=not is_terminal
            )
        bars[name].update(share - bars[name].n)
        if share >= 1:
            bars[name].close()

    try:
        yield on_progress
    finally:
        for bar in bars.values():
            bar.close()


def summary(engines: EngineFolder) -> str:
    state = engines.parity.get("note") or f"run: {pictures_of(engines.parity)}"
    lines = [
        f"{name:<14}{plan.seconds:>8.1f} s{plan.bytes / 2**20:>10.1f} MiB"
        f"{plan.peak_bytes / 2**30:>8.1f} GiB peak"
        for name, plan in engines.plans.items()
    ]
    built = f"{engines.precision} for {engines.gpu}, {engines.backend} {engines.backend_version}"
    return "\n".join([*lines, f"{engines.folder}: {built}", state])
