"""A ControlNet's two networks as engines. Beside ONNX Runtime's UNet it also runs `control_deep`,
which is called in every deep step; `control_prompt`, once a picture, and nets that differ from the
UNet's way down run in PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnxruntime
import torch
from torch import nn

from engines.control_graphs import control_graph
from engines.control_weights import ControlFile
from engines.folders.export_folder import ExportFolder
from engines.onnxruntime_engine import LARGE_BYTES, OnnxRuntimeEngine, new_session, options_for
from engines.pytorch.torch_engine import TorchEngine
from sdxl.engine import Engine
from sdxl.networks.control import control_networks
from sdxl.specs import Architecture, ModelSpec, control_specs


def torch_control(
    file: ControlFile,
    arch: Architecture,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    layout: torch.memory_format = torch.contiguous_format,
) -> dict[str, Engine]:
    """Load `control_prompt` and `control_deep`; `layout` is that of the loop's maps."""
    specs = control_specs(arch, file.architecture, dtype)
    return _in_torch(specs, _placed(file.network(), dtype, device, layout))


def onnx_control(file: ControlFile, export: ExportFolder) -> dict[str, Engine] | None:
    """Load the same beside an export's UNet; None if the net is not like the UNet's way down."""
    dtype = export.specs["unet_deep"].outputs[0].dtype
    specs = control_specs(export.arch, file.architecture, dtype)
    deep = specs["control_deep"]
    made = control_graph(export.graph_bytes("unet_deep"), deep, file.shapes)
    if made is None:
        return None
    graph, names = made
    module = _placed(file.network(), dtype)
    is_large = file.numbers * 4 > LARGE_BYTES
    options = options_for(runs_whole=is_large)
    tensors = module.state_dict()
    # The session copies them.
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(tensors[name].numpy()) for name in names]
    options.add_external_initializers(names, values)
    session = new_session(graph, export.folder / export.graphs["unet_deep"].file, options)
    engine = OnnxRuntimeEngine(deep, session, is_large)
    return {**_in_torch(specs, module), "control_deep": engine}


def _placed(
    module: nn.Module,
    dtype: str,
    device: torch.device | str = "cpu",
    layout: torch.memory_format = torch.contiguous_format,
) -> Any:
    # diffusers' own `to` warns about other models' needs.
    placed: Any = nn.Module.to(module, device, getattr(torch, dtype))
    return placed.to(memory_format=layout)


def _in_torch(specs: Mapping[str, ModelSpec], module: nn.Module) -> dict[str, Engine]:
    networks = control_networks(module)
    return {name: TorchEngine(specs[name], each) for name, each in networks.items()}
