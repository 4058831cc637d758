"""An export folder of tiny graphs: real ONNX with real external weights, made at once.

Every output depends on every input of its network, so that a swapped or stale tensor shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper
from safetensors.numpy import save_file

from engines.folders.export_folder import DataFile, ExportFolder, Graph
from engines.lora_graphs import graph_input, onnx_type
from onnx_export.stored import Stored, read_places
from sdxl.specs import Architecture, ModelSpec, network_specs
from tests.engines.damages import editor
from tests.fakes import ARCH

VOCABULARY = 50
DIGEST = "d" * 64
"""the digest of weights that the export names"""
DATA = "weights.safetensors"
PARITY = {
    "findings": [
        {"what": "clip_l, fp32", "measured": 1e-6, "required": 1e-4, "is_least": False},
        {"what": "8 pictures, PSNR in dB", "measured": 51.25, "required": 45, "is_least": True},
    ],
    "note": "",
}
Weights = dict[str, NDArray[Any]]


def write_export(
    folder: Path, *, arch: Architecture = ARCH, digest: str = DIGEST, dtype: str = "float32"
) -> ExportFolder:
    folder.mkdir(parents=True, exist_ok=True)
    specs = network_specs(arch, dtype)
    weights = {name: w for spec in specs.values() for name, w in _weights(spec, arch).items()}
    save_file(weights, folder / DATA)
    places = read_places(folder / DATA, DATA)
    graphs = {}
    for name, spec in specs.items():
        content = _graph(spec, arch, weights, places).SerializeToString()
        (folder / f"{name}.onnx").write_bytes(content)
        graphs[name] = Graph(f"{name}.onnx", _sha256(content), (DATA,), spec)
    data = (folder / DATA).read_bytes()
    export = ExportFolder(
        folder,
        "tiny",
        digest,
        "fp16" if dtype == "float16" else "fp32",
        "reference",
        arch,
        graphs,
        {DATA: DataFile(_sha256(data), len(data))},
        parity=PARITY,
    )
    export.write()
    return export


def rewrite_locations(path: Path, location: str) -> None:
    """Make a graph point into another file."""
    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    path.write_bytes(model.SerializeToString())


def sign(folder: Path, file: str) -> None:
    """Update the digest of a graph or of a file of weights in export.json."""
    digest = _sha256((folder / file).read_bytes())

    def change(described: dict[str, Any]) -> None:
        graphs = {graph["file"]: graph for graph in described["graphs"].values()}
        (graphs | described["data"])[file]["sha256"] = digest

    editor("export.json")(folder, change)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _weights(spec: ModelSpec, arch: Architecture) -> Weights:
    """One matrix for every output, from the first input's width to the output's."""
    generator = np.random.default_rng(len(spec.name))

    def drawn(*dims: int) -> NDArray[Any]:
        return (generator.standard_normal(dims) / 4).astype(np.dtype(spec.outputs[0].dtype))

    scale = arch.vae_scale
    named = {}
    for tensor in spec.outputs:
        width = [d for d in tensor.dims[1:] if isinstance(d, int)][-1]
        match spec.name:
            case "clip_l" | "clip_g":
                dims: tuple[int, ...] = (VOCABULARY, width)
            case "unet_prompt":
                dims = (arch.context_width, width)
            case "vae_decoder":
                dims = (arch.latent_channels, width, scale, scale)
            case "vae_encoder":
                dims = (width, arch.image_channels, scale, scale)
            case _:
                dims = (width, arch.latent_channels, 1, 1)
        named[f"{spec.name}.{tensor.name}"] = drawn(*dims)
    return named


def _graph(
    spec: ModelSpec, arch: Architecture, weights: Weights, places: Mapping[str, Stored]
) -> onnx.ModelProto:
    nodes = list(_nodes(spec, arch))
    used = {name for node in nodes for name in node.input}
    external = [
        _external(name, weights[name], places[name]) for name in sorted(used & set(weights))
    ]
    constants = [
        helper.make_tensor("column", TensorProto.INT64, [4], [-1, 1, 1, 1]),
        helper.make_tensor("beside", TensorProto.INT64, [3], [-1, 1, 1]),
        helper.make_tensor("tokens", TensorProto.INT64, [1], [1]),
    ]
    graph = helper.make_graph(
        nodes,
        spec.name,
        [graph_input(t) for t in spec.inputs],
        [graph_input(t) for t in spec.outputs],
        [*external, *(c for c in constants if c.name in used)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _nodes(spec: ModelSpec, arch: Architecture) -> Iterable[onnx.NodeProto]:
    if spec.name.startswith("clip"):
        yield from _text_nodes(spec)
    elif spec.name == "unet_prompt":
        yield from _prompt_nodes(spec)
    elif spec.name == "vae_decoder":
        weight = f"{spec.name}.image"
        yield helper.make_node(
            "ConvTranspose", ["latents", weight], ["image"], strides=[arch.vae_scale] * 2
        )
    elif spec.name == "vae_encoder":
        for tensor in spec.outputs:
            names = ["image", f"{spec.name}.{tensor.name}"]
            yield helper.make_node("Conv", names, [tensor.name], strides=[arch.vae_scale] * 2)
    else:
        yield from _unet_nodes(spec)


def _text_nodes(spec: ModelSpec) -> Iterable[onnx.NodeProto]:
    hidden = spec.outputs[0].name
    yield helper.make_node("Gather", [f"{spec.name}.{hidden}", "token_ids"], [hidden])
    for pooled in spec.outputs[1:]:
        gathered = f"{pooled.name}.all"
        yield helper.make_node("Gather", [f"{spec.name}.{pooled.name}", "token_ids"], [gathered])
        yield helper.make_node("ReduceMean", [gathered, "tokens"], [pooled.name], keepdims=0)


def _prompt_nodes(spec: ModelSpec) -> Iterable[onnx.NodeProto]:
    context, *others = (tensor.name for tensor in spec.inputs)
    for name in others:
        yield helper.make_node("ReduceMean", [name, "tokens"], [f"{name}.mean"], keepdims=1)
    yield helper.make_node("Add", [f"{name}.mean" for name in others], ["mean"])
    yield helper.make_node("Reshape", ["mean", "beside"], ["mean.beside"])
    yield helper.make_node("Add", [context, "mean.beside"], ["told"])
    yield helper.make_node("ReduceMean", ["told", "tokens"], ["told.mean"], keepdims=0)
    for tensor in spec.outputs:
        read = "told" if len(tensor.dims) == 3 else "told.mean"
        yield helper.make_node("MatMul", [read, f"{spec.name}.{tensor.name}"], [tensor.name])


def _unet_nodes(spec: ModelSpec) -> Iterable[onnx.NodeProto]:
    element = onnx_type(spec.outputs[0].dtype)
    means = []
    for i, tensor in enumerate(spec.inputs[1:]):
        flat, cast = f"{tensor.name}.flat", f"{tensor.name}.cast"
        yield helper.make_node("Flatten", [tensor.name], [flat], axis=1)
        yield helper.make_node("Cast", [flat], [cast], to=element)
        yield helper.make_node("ReduceMean", [cast, "tokens"], [f"{tensor.name}.mean"], keepdims=1)
        yield helper.make_node("Reshape", [f"{tensor.name}.mean", "column"], [f"mean{i}"])
        means.append(f"mean{i}")
    for tensor in spec.outputs:
        last = f"{tensor.name}.conv"
        yield helper.make_node("Conv", ["sample", f"{spec.name}.{tensor.name}"], [last])
        for i, mean in enumerate(means):
            result = tensor.name if mean == means[-1] else f"{tensor.name}.{i}"
            # The sine keeps a timestep of 999 from hiding the other inputs.
            yield helper.make_node("Sin", [mean], [f"{result}.sin"])
            yield helper.make_node("Add", [last, f"{result}.sin"], [result])
            last = result


def _external(name: str, value: NDArray[Any], place: Stored) -> onnx.TensorProto:
    tensor = TensorProto(
        name=name,
        data_type=helper.np_dtype_to_tensor_dtype(value.dtype),
        dims=value.shape,
        data_location=TensorProto.EXTERNAL,
    )
    for key, entry in (
        ("location", place.file),
        ("offset", place.offset),
        ("length", place.length),
    ):
        tensor.external_data.add(key=key, value=str(entry))
    return tensor
