"""ONNX Runtime behind the Engine contract: the fast way on a CPU.

Sessions read and write the very memory of the tensors they are handed. All of them share one
thread pool: with a pool each, one network's idle threads would spin while another one computes.
Deep and Shallow share their weights on disk, not in memory: Shallow holds about 1% of them, and
its copies are folded and packed for its own kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from engines.export_folder import ExportFolder
from sdxl.engine import Engine, Engines, check_inputs
from sdxl.specs import ModelSpec, ShapeError, TensorSpec

BUCKETS = (1, 2, 4, 6, 8, 10, 12, 14, 16)
"""A CPU's time grows with the rows: padding three images to four would waste a quarter."""

ERRORS_ONLY = 3
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"


class OnnxRuntimeError(RuntimeError):
    """A graph that ONNX Runtime cannot load or run: which one, and why."""


@dataclass(frozen=True)
class OnnxRuntimeEngine:
    spec: ModelSpec
    session: Any

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        check_inputs(self.spec, inputs)
        binding = self.session.io_binding()
        for tensor in self.spec.inputs:
            binding.bind_input(*_memory(self.spec, tensor, inputs))
        for tensor in self.spec.outputs:
            binding.bind_output(*_memory(self.spec, tensor, outputs))
        try:
            self.session.run_with_iobinding(binding)
        except Exception as error:
            raise OnnxRuntimeError(f"{self.spec.name}: {_line(error)}") from error


def load_onnxruntime(export: ExportFolder) -> Engines:
    engines: dict[str, Engine] = {
        name: OnnxRuntimeEngine(graph.spec, open_session(export, name))
        for name, graph in export.graphs.items()
    }
    return Engines(
        export.arch,
        engines,
        cut=export.cut,
        buckets=BUCKETS,
        description={
            "backend": "onnxruntime",
            "precision": export.precision,
            "device": "cpu",
            "version": onnxruntime.__version__,
        },
    )


def open_session(export: ExportFolder, name: str) -> Any:
    """A session on one graph of an export; its bytes are checked before they are parsed."""
    return new_session(export.graph_bytes(name), export.folder / export.graphs[name].file)


def new_session(graph: bytes, path: Path) -> Any:
    """`path` is where the graph lies, with the weights that it points into beside it."""
    start_threads()
    options = session_options()
    options.add_session_config_entry(WEIGHTS_FOLDER, str(path.parent))
    try:
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise OnnxRuntimeError(f"{path}: {_line(error)}; export again") from error


def session_options() -> Any:
    """What `python -m eval.session_options` finds best."""
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = ERRORS_ONLY
    # Planning which tensors share memory takes three quarters of loading a UNet; the arena reuses
    # what was freed all the same, at the same peak and speed.
    options.enable_mem_reuse = False
    return options


@cache
def start_threads() -> int:
    """The threads that all sessions share: as many as PyTorch would use, so that one setting
    (OMP_NUM_THREADS) governs both. ONNX Runtime takes the number once in a process."""
    threads = torch.get_num_threads()
    onnxruntime.set_global_thread_pool_sizes(threads, 1)
    return threads


def _memory(
    spec: ModelSpec, tensor: TensorSpec, tensors: Mapping[str, Tensor]
) -> tuple[str, str, int, Any, tuple[int, ...], int]:
    found = tensors[tensor.name]
    if not found.is_contiguous() or found.device.type != "cpu":
        raise ShapeError(
            f"{spec.name}: {tensor.name!r} is on {found.device} with strides {found.stride()}, "
            "needed a contiguous tensor on the CPU"
        )
    element = np.dtype(tensor.dtype).type
    return tensor.name, "cpu", 0, element, tuple(found.shape), found.data_ptr()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
