"""Exports a checkpoint to a folder: seven ONNX graphs, and the weight files that they refer to.

Unchanged parts are copied from the last export. The new folder is made beside the old one and
replaces it after the check. A folder that failed the check is kept, because a calibration may take
hours.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from tqdm import tqdm

from engines.folders.export_folder import (
    FILE,
    DataFile,
    ExportError,
    ExportFolder,
    Graph,
    changed_file,
    further_file,
)
from engines.folders.publishing import (
    disk_errors,
    link_or_copy,
    locked,
    publish,
    refuse_other_folder,
)
from engines.lora import load_parts
from onnx_export import calibration, fingerprint, quantisation
from onnx_export.binding import bind
from onnx_export.export_spec import ExportSpec
from onnx_export.plain_maxima import numbers_of, watched
from onnx_export.quantisation import Quantised
from onnx_export.recipes import RECIPES
from onnx_export.stored import Stored, unchanged_places, write_tensors
from onnx_export.tracing import trace
from sdxl.checkpoint import NETWORK_FOLDERS, Checkpoint
from sdxl.digests import sha256_of
from sdxl.engine import torch_dtype
from sdxl.files import write_atomic, write_json
from sdxl.networks.halves import fit_halves
from sdxl.networks.parts import networks_of
from sdxl.specs import ModelSpec

REPORT = "quantisation.json"
UNCHECKED = "published without a check: serving it takes --unchecked"
KEPT = "kept; repeat the command to check it again, or add --unchecked to publish it"

Say = Callable[[str], None]
Check = Callable[[ExportFolder, ExportSpec, Say], Mapping[str, Any]]


def unchecked(export: ExportFolder, order: ExportSpec, say: Say) -> Mapping[str, Any]:
    say(UNCHECKED)
    return {"findings": [], "note": UNCHECKED}


def export(order: ExportSpec, check: Check, say: Say = print) -> ExportFolder:
    """Make an export, check it and publish it. If `check` raises, the folder is kept, and the next
    export of the same starts with the check."""
    keys = fingerprint.of_parts(order)
    old = None if order.is_forced else _open(order.out)
    if old is None:
        refuse_other_folder(order.out, FILE, "an export")
    elif _is_made(old, order, keys):
        say(f"{order.out}: nothing has changed")
        return old if old.is_checked else _checked(old, order, check, say)
    with locked(order.out, waits=False):
        making = order.out.with_name(f".{order.out.name}.making")
        with disk_errors(making):
            folder = _built(making, order, old, keys, say)
            try:
                folder = _checked(folder, order, check, say)
            except Exception:
                say(f"{making}: {KEPT}")
                raise
            publish(making, order.out)
    return replace(folder, folder=order.out)


def _built(
    making: Path, order: ExportSpec, old: ExportFolder | None, keys: Mapping[str, str], say: Say
) -> ExportFolder:
    """Make the folder, or return the one that an earlier export kept."""
    kept = None if order.is_forced else _open(making)
    if kept is not None and _is_made(kept, order, keys):
        say(f"{making}: was kept, only the check is left")
        return kept
    shutil.rmtree(making, ignore_errors=True)
    try:
        making.mkdir(parents=True)
        return _Builder(order, making, say).build(old, keys)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


def _checked(folder: ExportFolder, order: ExportSpec, check: Check, say: Say) -> ExportFolder:
    folder = replace(folder, parity=check(folder, order, say))
    folder.write()
    return folder


def calibrated_on(order: ExportSpec) -> dict[str, Any]:
    if order.precision not in RECIPES:
        return {}
    digest = hashlib.sha256("\n".join(order.prompts).encode()).hexdigest()
    recipe = RECIPES[order.precision]
    facts = {"prompts": len(order.prompts), "prompts_sha256": digest, **asdict(order.settings)}
    return facts | {"steps": recipe.steps, "calibrated_steps": recipe.calibrated_steps}


@dataclass
class _Builder:
    """Makes one folder."""

    order: ExportSpec
    folder: Path
    say: Say
    graphs: dict[str, Graph] = field(default_factory=dict)
    data: dict[str, DataFile] = field(default_factory=dict)

    def build(self, old: ExportFolder | None, keys: Mapping[str, str]) -> ExportFolder:
        known = old.versions.get("parts", {}) if old else {}
        for part in NETWORK_FOLDERS:
            if old is not None and known.get(part) == keys[part]:
                self.take_over(old, part)
            else:
                self.export_part(part)
        order = self.order
        folder = ExportFolder(
            self.folder,
            order.checkpoint.origin or order.checkpoint.name,
            order.checkpoint.digest,
            order.precision,
            order.cut,
            order.checkpoint.arch,
            {name: self.graphs[name] for name in order.specs},
            self.data,
            loras=tuple(lora.as_dict() for lora in order.loras),
            calibration=calibrated_on(order),
            versions={**fingerprint.versions(), "parts": dict(keys)},
        )
        folder.write()
        return folder

    def take_over(self, old: ExportFolder, part: str) -> None:
        for name in _graphs_of(old, part):
            graph = old.graphs[name]
            link_or_copy(old.folder / graph.file, self.folder / graph.file)
            self.graphs[name] = graph
            for data in graph.data:
                if data not in self.data:
                    link_or_copy(old.folder / data, self.folder / data)
                    self.data[data] = old.data[data]
            self.say(f"{name:<13} unchanged")
        if (further := further_file(part)) in old.data:
            link_or_copy(old.folder / further, self.folder / further)
            self.data[further] = old.data[further]
        report = old.folder / REPORT
        if part == "unet" and report.exists():
            link_or_copy(report, self.folder / REPORT)

    def export_part(self, part: str) -> None:
        order, specs = self.order, self.order.specs
        module = load_parts(order.checkpoint, order.loras, part)[part]
        if part == "vae" and specs["vae_decoder"].outputs[0].dtype == "float16":
            fit_halves(module)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        places: dict[str, Stored] = {}
        for file, path in checkpoint_files(order.checkpoint, part).items():
            link_or_copy(path, self.folder / file)
            source = f"{part}/{path.name}"
            digest = order.checkpoint.file_digests[source]
            self.data[file] = DataFile(digest, path.stat().st_size, source)
            places |= unchanged_places(parameters, path, file)
        names = {id(parameter): name for name, parameter in parameters.items()}
        networks = networks_of(part, module, order.cut)
        dtype = torch_dtype(specs[next(iter(networks))].outputs[0])
        changed = {n: p.to(dtype) for n, p in parameters.items() if n not in places}
        for network in networks.values():
            # diffusers' `to` prints warnings that concern other models.
            nn.Module.to(network, dtype)
        models = {name: self.trace(name, network) for name, network in networks.items()}
        if part == "unet" and order.precision in RECIPES:
            changed |= self.quantise(nn.Module.float(module)).tensors
        if changed:
            places |= self.write_data(changed, changed_file(part))
        for name, network in networks.items():
            parameter_names = network.named_parameters(remove_duplicate=False)
            bind(models[name], {n: names[id(p)] for n, p in parameter_names}, places)
            self.write_graph(models[name], specs[name])

    def write_data(self, tensors: Mapping[str, Tensor], file: str) -> dict[str, Stored]:
        places = write_tensors(tensors, self.folder / file)
        size = (self.folder / file).stat().st_size
        self.data[file] = DataFile(sha256_of(self.folder / file), size)
        return places

    def trace(self, name: str, network: nn.Module) -> ir.Model:
        start = time.perf_counter()
        model = trace(self.order.specs[name], network)
        took = time.perf_counter() - start
        self.say(f"{name:<13} {len(model.graph)} nodes, {took:.1f} s")
        return model

    def quantise(self, unet: nn.Module) -> Quantised:
        order, recipe = self.order, RECIPES[self.order.precision]
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        encoders = load_parts(
            order.checkpoint, order.loras, *calibration.encoders_of(order.checkpoint)
        )
        parts = {name: part.to(device) for name, part in {**encoders, "unet": unet}.items()}
        dtype = torch_dtype(order.specs["unet_deep"].outputs[0])
        layers = dict(parts["unet"].named_modules())
        further = {name: layer for name, layer in layers.items() if recipe.further_rule_for(name)}
        start = time.perf_counter()
        with watched(further) as maxima:
            quantised = quantisation.quantise(
                parts["unet"],
                recipe,
                lambda clock: calibration.first_steps(
                    order.checkpoint,
                    parts,
                    order.prompts,
                    recipe,
                    order.settings,
                    clock,
                    order.cut,
                    lambda done, count: self.say(progress_line(done, count, start)),
                ),
                dtype,
            )
        self.write_data(numbers_of(further, maxima, recipe, dtype), further_file("unet"))
        took = time.perf_counter() - start
        self.say(f"calibrated on {len(order.prompts)} prompts, {took:.1f} s; layers:")
        self.say(quantisation.summary(quantised.report))
        self.say(f"  {len(further):5} more in 8 bits for PyTorch's backend alone")
        write_json(self.folder / REPORT, [asdict(row) for row in quantised.report], end="")
        return quantised

    def write_graph(self, model: ir.Model, spec: ModelSpec) -> None:
        path = self.folder / f"{spec.name}.onnx"
        write_atomic(path, ir.to_proto(model).SerializeToString(deterministic=True))
        files = {
            value.const_value.location
            for value in model.graph.initializers.values()
            if isinstance(value.const_value, ir.ExternalTensor)
        }
        data = tuple(sorted(map(str, files)))
        self.graphs[spec.name] = Graph(path.name, sha256_of(path), data, spec)


def progress_line(done: int, count: int, start: float) -> str:
    """Describe the finished prompts, and about how long the others take."""
    line = f"calibrated {done} of {count} prompts"
    left_s = (time.perf_counter() - start) / done * (count - done)
    return f"{line}, about {tqdm.format_interval(left_s)} left" if done < count else line


def checkpoint_files(checkpoint: Checkpoint, part: str) -> dict[str, Path]:
    """Return a part's weight files by their names beside the graphs."""
    files = checkpoint.weight_files(part)
    if len(files) == 1:
        return {f"{part}.safetensors": files[0]}
    return {f"{part}.{i}.safetensors": path for i, path in enumerate(files)}


def _graphs_of(export: ExportFolder, part: str) -> list[str]:
    """Return the graphs that refer to the part's files."""
    return [
        name
        for name, graph in export.graphs.items()
        if any(data.partition(".")[0] == part for data in graph.data)
    ]


def _open(folder: Path) -> ExportFolder | None:
    try:
        return ExportFolder.open(folder, verify=True)
    except ExportError:
        return None


def _is_made(export: ExportFolder, order: ExportSpec, keys: Mapping[str, str]) -> bool:
    """True if the order would make the same export."""
    facts = export.versions.get("parts"), export.model_digest, export.precision, export.cut
    return facts == (keys, order.checkpoint.digest, order.precision, order.cut)
