"""ONNX Runtime as an Engine: the fastest backend on a CPU.

Sessions read and write the tensors' memory directly. Rows are independent, so the two halves of a
call run at the same time: two threads that each run half of the rows are faster than two threads
that share each layer and wait for each other. A large graph runs all rows at once, because each
half would widen its own copy of 8-bit weights, 6 GB for SDXL. Deep and Shallow share weights on
disk, not in memory: Shallow has about 1% of them, packed for its own kernels.
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

from engines.bank_shelf import BankShelf, new_bank
from engines.cpu import rows_on_cpu
from engines.folders.export_folder import ExportFolder
from engines.low_rank import Bank
from engines.trt.flavours import BackendFailed
from sdxl.engine import Engine, Engines, check_inputs
from sdxl.handover import WorkThread
from sdxl.slow import log_if_slow
from sdxl.specs import (
    ModelSpec,
    ShapeError,
    TensorSpec,
    lora_name,
    plain_name,
    variants_of,
    with_loras,
)

BUCKETS = (1, 2, 4, 6, 8, 10, 12, 14, 16)
"""A CPU's time grows with the rows, so padding three images to four would waste a quarter."""

MAX_BOUND = 64
ERRORS_ONLY = 3
LARGE_BYTES = 2**30
"""bytes of weights above which a graph is large"""
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"


class OnnxRuntimeError(BackendFailed):
    """ONNX Runtime cannot load or run a graph."""


@dataclass(frozen=True)
class OnnxRuntimeEngine:
    spec: ModelSpec
    session: Any
    is_large: bool = False
    bank: Mapping[str, Tensor] = field(default_factory=dict)
    """inputs that are the same in every call: the pages of LoRAs"""
    _bound: dict[Hashable, list[Any]] = field(default_factory=dict)
    """bindings of a call's halves, by the call's tensors; calls use the same buffers again"""

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
            # The tensors are passed too, so that they exist while the other thread writes to them.
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
        for tensor in self.spec.bank:
            binding.bind_input(*_memory(self.spec, tensor, self.bank, slice(None)))
        for tensor in self.spec.outputs:
            binding.bind_output(*_memory(self.spec, tensor, outputs, rows))
        return binding


def load_onnxruntime(export: ExportFolder) -> Engines:
    def open_all() -> dict[str, Engine]:
        return {name: _open(export, name, graph.spec) for name, graph in export.graphs.items()}

    engines = _Networks(export, export.load_checked(open_all))
    counts = rows_on_cpu(export.arch, BUCKETS)
    return Engines(
        export.arch,
        engines,
        cut=export.cut,
        buckets=counts,
        decode_batch=min(2, counts[-1] // 2),
        adapters=BankShelf(partial(_add_loras, export, engines)),
        description={
            "backend": "onnxruntime",
            "precision": export.precision,
            "device": "cpu",
            "version": onnxruntime.__version__,
            **({"loras": export.loras} if export.loras else {}),
        },
    )


class _Networks(dict[str, Engine]):
    """An export's networks by name. Networks that take residuals of ControlNets or image prompts
    are opened at the first look-up."""

    def __init__(self, export: ExportFolder, networks: Mapping[str, Engine]) -> None:
        super().__init__(networks)
        self.export = export

    def __missing__(self, name: str) -> Engine:
        # Imported late: pictures without such networks do not need `onnx`.
        from engines.control_graphs import variant_graph

        export, plain = self.export, plain_name(name)
        specs = variants_of({**export.specs, **with_loras(export.specs)}, export.arch)
        graph, spec = variant_graph(export.graph_bytes(plain), specs[name])
        without: Any = self[lora_name(name)]
        self[name] = _open(export, plain, spec, graph, without.bank)
        return self[name]


def _open(
    export: ExportFolder,
    name: str,
    spec: ModelSpec,
    content: bytes = b"",
    bank: Mapping[str, Tensor] | None = None,
) -> Engine:
    with log_if_slow(f"loading {spec.name}"):
        session = open_session(export, name, content)
    return OnnxRuntimeEngine(spec, session, is_large(export, name), bank or {})


def _add_loras(export: ExportFolder, engines: dict[str, Engine]) -> Bank:
    """Add the networks with LoRAs to the engines."""
    # Imported late: pictures without LoRAs do not need `onnx`.
    from engines.lora_graphs import add_loras

    graphs = [
        add_loras(export.graph_bytes(plain_name(spec.name)), spec)
        for spec in with_loras(export.specs).values()
    ]
    bank = new_bank([t for _, spec in graphs for t in spec.bank], torch.device("cpu"))

    def open_all() -> dict[str, Engine]:
        return {
            spec.name: _open(export, plain_name(spec.name), spec, graph, bank)
            for graph, spec in graphs
        }

    engines |= export.load_checked(open_all)
    return bank


def open_session(export: ExportFolder, name: str, content: bytes = b"") -> Any:
    """Check and open a graph of an export, or open `content`, which was made from the graph."""
    path = export.folder / export.graphs[name].file
    options = options_for(runs_whole=is_large(export, name))
    return new_session(content or export.graph_bytes(name), path, options)


def options_for(*, runs_whole: bool) -> Any:
    if runs_whole:
        return session_options(threads(), has_arena=False)
    # Each half of a call has a thread besides the session's threads, which the halves share.
    return session_options(max(threads() - 1, 1))


def is_large(export: ExportFolder, name: str) -> bool:
    return sum(export.data[file].bytes for file in export.graphs[name].data) > LARGE_BYTES


def new_session(graph: bytes, path: Path, options: Any) -> Any:
    """Open a session. The graph's weights are in the folder of `path`."""
    options.add_session_config_entry(WEIGHTS_FOLDER, str(path.parent))
    try:
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise OnnxRuntimeError(f"{path}: {_line(error)}; export again") from error


def session_options(threads: int, has_arena: bool = True) -> Any:
    """Return the fastest options, as measured by `sdxl bench sessions`."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Idle threads of one network must not spin while another computes.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = ERRORS_ONLY
    # Planning which tensors share memory takes three quarters of the time to load a UNet. The arena
    # reuses freed memory anyway, at the same peak and speed.
    options.enable_mem_reuse = False
    if not has_arena:
        # The arena keeps all tensors of a call, including widened 8-bit weights. A small model
        # without an arena would lose a twentieth of its speed.
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    return options


def threads() -> int:
    """Return PyTorch's number of threads. OMP_NUM_THREADS sets it for both libraries."""
    return torch.get_num_threads()


@cache
def _thread() -> WorkThread:
    """The thread that runs the second half of every call."""
    return WorkThread()


def _memory(
    spec: ModelSpec, tensor: TensorSpec, tensors: Mapping[str, Tensor], rows: slice
) -> tuple[str, str, int, Any, tuple[int, ...], int]:
    value = tensors[tensor.name][rows]
    if not value.is_contiguous() or value.device.type != "cpu":
        raise ShapeError(
            f"{spec.name}: {tensor.name!r} is on {value.device} with strides {value.stride()}, "
            "expected a contiguous tensor on the CPU"
        )
    element = np.dtype(tensor.dtype).type
    return tensor.name, "cpu", 0, element, tuple(value.shape), value.data_ptr()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
