"""The forms in which Triton compiles our kernels: a kernel with the types of its arguments, what is
known of their values, and options. Forms come from launches recorded on the meta device.

It uses the same private functions of Triton as a launch does, so that both find the same files in
Triton's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from importlib import import_module
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from engines.pytorch.launches import FUSION, Launch
from engines.pytorch.tiles import TileProblem, fitting

PRODUCTS = ("_product", "_tma_product", "_gated_product")


@dataclass(frozen=True)
class Form:
    """One way in which a kernel is compiled; `key` tells it from all others."""

    key: str
    module: str
    kernel: str
    signature: Mapping[str, str] = field(compare=False)
    constants: Mapping[str, Any] = field(compare=False)
    attributes: Mapping[tuple[int, ...], Any] = field(compare=False)
    options: Mapping[str, Any] = field(compare=False)

    @property
    def source(self) -> Any:
        kernel = getattr(import_module(self.module), self.kernel)
        return ASTSource(kernel, dict(self.signature), dict(self.constants), dict(self.attributes))


def form_of(launch: Launch, target: GPUTarget) -> Form:
    """The form that Triton compiles for a launch."""
    kernel = launch.kernel
    backend, bind = _binder(kernel, target)
    given = {
        **FUSION,
        **launch.constants,
        "debug": kernel.debug or triton.knobs.runtime.debug,
        "instrumentation_mode": triton.knobs.compilation.instrumentation_mode,
    }
    arguments, specialised, _ = bind(*launch.arguments, **given)
    options, signature, constants, attributes = kernel._pack_args(
        backend, given, arguments, specialised, None
    )
    source = ASTSource(kernel, signature, constants, attributes)
    return Form(
        f"{source.hash()} {options.hash()}",
        kernel.module,
        launch.name,
        signature,
        {kernel.arg_names[place[0]]: value for place, value in constants.items()},
        attributes,
        dict(options.__dict__),
    )


@cache
def _binder(kernel: Any, target: GPUTarget) -> tuple[Any, Any]:
    backend = make_backend(target)
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def compile_form(form: Form, target: GPUTarget) -> Any:
    """Compile a form, or find it in Triton's cache."""
    return triton.compile(form.source, target=target, options=dict(form.options))


def in_every_tile(
    launch: Launch, shared_bytes: int, has_tensor_memory: bool = False
) -> Iterator[Launch]:
    """A product in every tile that fits the GPU; other launches as they are."""
    if launch.name not in PRODUCTS:
        yield launch
        return
    is_gated = launch.name == "_gated_product"
    given: Any = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False))["x"]
    number = str(getattr(given, "base", given).dtype).removeprefix("torch.")
    has_residual = bool(launch.constants.get("HAS_RESIDUAL"))
    problem = TileProblem(number, 1, 1, 1, 1, has_residual, is_gated)
    for tile in fitting(problem, shared_bytes, has_tensor_memory):
        names = ("M", "N", "K", "num_warps", "num_stages")
        constants = {**launch.constants, **dict(zip(names, astuple(tile), strict=True))}
        lines = [2, tile.n // 2] if is_gated else [tile.n]
        blocks = iter(([tile.m, tile.k], [*lines, tile.k]))
        arguments = tuple(
            replace(each, block_shape=next(blocks)) if isinstance(each, TensorDescriptor) else each
            for each in launch.arguments
        )
        yield replace(launch, arguments=arguments, constants=constants)
