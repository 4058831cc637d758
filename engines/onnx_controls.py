"""ControlNets beside an export's UNet on ONNX Runtime.

ONNX Runtime runs a net's `control_deep`, which is called in every deep step. PyTorch runs
`control_prompt`, which is called once for a picture, and nets that differ from the UNet's way down.
"""

from __future__ import annotations

import onnxruntime
import torch
from torch import nn

from engines.control_graphs import control_graph
from engines.control_weights import ControlFile
from engines.folders.export_folder import ExportFolder
from engines.onnxruntime_engine import LARGE_BYTES, OnnxRuntimeEngine, new_session, options_for
from engines.pytorch.torch_engine import control_engines
from sdxl.engine import Engine
from sdxl.specs import control_specs


def load_control(export: ExportFolder, file: ControlFile) -> dict[str, Engine]:
    dtype = export.specs["unet_deep"].outputs[0].dtype
    specs = control_specs(export.arch, file.architecture, dtype)
    deep = specs["control_deep"]
    graph_and_names = control_graph(export.graph_bytes("unet_deep"), deep, file.shapes)
    # diffusers' `to` prints warnings that concern other models.
    module = nn.Module.to(file.network(), getattr(torch, dtype))
    engines = control_engines(specs, module)
    if graph_and_names is None:
        return engines
    graph, names = graph_and_names
    is_large = file.numbers * 4 > LARGE_BYTES
    options = options_for(runs_whole=is_large)
    tensors = module.state_dict()
    # The session copies these values.
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(tensors[name].numpy()) for name in names]
    options.add_external_initializers(names, values)
    session = new_session(graph, export.folder / export.graphs["unet_deep"].file, options)
    return {**engines, deep.name: OnnxRuntimeEngine(deep, session, is_large)}
