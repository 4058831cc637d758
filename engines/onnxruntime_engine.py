"""ONNX Runtime behind the Engine contract: the fast way on a CPU.

Sessions read and write the very memory of the tensors they are handed. What lies along the first
axis of a call is independent, so its two halves run at the same time: two threads that never wait
for each other inside a layer take less time than two that share every layer. A large graph is
called with all rows: where its weights are 8 bits, each half would widen all of them for itself,
6 GB of SDXL's. Deep and Shallow share their weights on disk, not in memory: Shallow holds about 1%
of them, and its copies are folded and packed for its own kernels.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from engines.cpu import rows_on_cpu
from engines.folders.export_folder import ExportFolder
from engines.trt.flavours import BackendFailed
from sdxl.engine import Engine, Engines, check_inputs
from sdxl.handover import WorkThread
from sdxl.slow import named_if_slow
from sdxl.specs import ModelSpec, ShapeError, TensorSpec

BUCKETS = (1, 2, 4, 6, 8, 10, 12, 14, 16)
"""A CPU's time grows with the rows: padding three images to four would waste a quarter."""

MAX_BOUND = 64
ERRORS_ONLY = 3
LARGE_BYTES = 2**30
"""of weights"""
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"


class OnnxRuntimeError(BackendFailed):
    """A graph that ONNX Runtime cannot load or run: which one, and why."""


@dataclass(frozen=True)
class OnnxRuntimeEngine:
    spec: ModelSpec
    session: Any
    is_large: bool = False
    _bound: dict[Hashable, list[Any]] = field(default_factory=dict)
    """The halves of a call, by what tells its tensors from others: buffers come again."""

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        key = tuple(
            (t.data_ptr(), t.shape, t.stride(), t.dtype)
            for t in (*inputs.values(), *outputs.values())
        )
        halves = self._bound.get((*inputs, *outputs, key))
        if halves is None:
            if len(self._bound) >= MAX_BOUND:
                self._bound.clear()
            halves = self._bound[(*inputs, *outputs, key)] = self._bind(inputs, outputs)
        first = partial(self._run, halves[0])
        if len(halves) == 1:
            first()
        else:
            # With the tensors: they must live as long as the other thread may write to them.
            _thread().together(first, partial(self._run, halves[1], inputs, outputs))

    def _run(self, binding: Any, *_: Mapping[str, Tensor]) -> None:
        try:
            self.session.run_with_iobinding(binding)
        except Exception as error:
            raise OnnxRuntimeError(f"{self.spec.name}: {_line(error)}") from error

    def _bind(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> list[Any]:
        check_inputs(self.spec, inputs)
        count = len(inputs[self.spec.inputs[0].name])
        half = (count + 1) // 2 if threads() > 1 and not self.is_large else count
        parts = (slice(half), slice(half, count)) if half < count else (slice(count),)
        return [self._bind_part(inputs, outputs, part) for part in parts]

    def _bind_part(
        self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], rows: slice
    ) -> Any:
        binding = self.session.io_binding()
        for tensor in self.spec.inputs:
            binding.bind_input(*_memory(self.spec, tensor, inputs, rows))
        for tensor in self.spec.outputs:
            binding.bind_output(*_memory(self.spec, tensor, outputs, rows))
        return binding


def load_onnxruntime(export: ExportFolder) -> Engines:
    def open_all() -> dict[str, Engine]:
        found: dict[str, Engine] = {}
        for name, graph in export.graphs.items():
            with named_if_slow(f"loading {name}"):
                session = open_session(export, name)
                found[name] = OnnxRuntimeEngine(graph.spec, session, is_large(export, name))
        return found

    engines = export.load_checked(open_all)
    counts = rows_on_cpu(export.arch, BUCKETS)
    return Engines(
        export.arch,
        engines,
        cut=export.cut,
        buckets=counts,
        decode_batch=min(2, counts[-1] // 2),
        description={
            "backend": "onnxruntime",
            "precision": export.precision,
            "device": "cpu",
            "version": onnxruntime.__version__,
            **({"loras": export.loras} if export.loras else {}),
        },
    )


def open_session(export: ExportFolder, name: str) -> Any:
    """A session on one graph of an export; its bytes are checked before they are parsed."""
    graph = export.graphs[name]
    if is_large(export, name):
        options = session_options(threads(), has_arena=False)
    else:
        # Halves of a call share the session's threads; each brings one of its own.
        options = session_options(max(threads() - 1, 1))
    return new_session(export.graph_bytes(name), export.folder / graph.file, options)


def is_large(export: ExportFolder, name: str) -> bool:
    return sum(export.data[file].bytes for file in export.graphs[name].data) > LARGE_BYTES


def new_session(graph: bytes, path: Path, options: Any) -> Any:
    """`path` is where the graph lies, with the weights that it points into beside it."""
    options.add_session_config_entry(WEIGHTS_FOLDER, str(path.parent))
    try:
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise OnnxRuntimeError(f"{path}: {_line(error)}; export again") from error


def session_options(threads: int, has_arena: bool = True) -> Any:
    """What `sdxl bench sessions` finds best."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Else one network's idle threads would spin while another one computes.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = ERRORS_ONLY
    # Planning which tensors share memory takes three quarters of loading a UNet; the arena reuses
    # what was freed all the same, at the same peak and speed.
    options.enable_mem_reuse = False
    if not has_arena:
        # It keeps what one call needs, all of its tensors side by side, and 8-bit weights are
        # widened in every call. A small model would lose a twentieth of its speed.
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    return options


def threads() -> int:
    """As many as PyTorch would use, so that one setting (OMP_NUM_THREADS) governs both."""
    return torch.get_num_threads()


@cache
def _thread() -> WorkThread:
    """Runs the second half of every call."""
    return WorkThread()


def _memory(
    spec: ModelSpec, tensor: TensorSpec, tensors: Mapping[str, Tensor], rows: slice
) -> tuple[str, str, int, Any, tuple[int, ...], int]:
    found = tensors[tensor.name][rows]
    if not found.is_contiguous() or found.device.type != "cpu":
        raise ShapeError(
            f"{spec.name}: {tensor.name!r} is on {found.device} with strides {found.stride()}, "
            "expected a contiguous tensor on the CPU"
        )
    element = np.dtype(tensor.dtype).type
    return tensor.name, "cpu", 0, element, tuple(found.shape), found.data_ptr()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
