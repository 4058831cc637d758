"""Compiles kernels before their first call, in other processes.

A form is a kernel with the types of its arguments, the known facts about their values, and options.
Launches recorded on the meta device list the forms. This module uses the same private functions of
Triton as a launch, so both find the same files in Triton's cache.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from importlib import import_module
from typing import Any

import torch
import triton
from torch import nn
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from engines.low_rank import Bank, adapted, bank_of
from engines.pytorch.launches import FUSION, Launch, meta_inputs, noted
from engines.pytorch.slots import LINE, in_slots
from engines.pytorch.tiles import Tile, TileProblem
from sdxl.specs import CHUNK, VARIANTS, Architecture, ModelSpec, image_axes

log = logging.getLogger(__name__)

STEPS = ("unet_deep", "unet_shallow")
PRODUCTS = ("_product", "_tma_product", "_gated_product")
MOST_PROCESSES = 8
LOGGED_EVERY = 12
COMPILED = "compiled"
"""the line that a process prints for each compiled form"""


@dataclass(frozen=True)
class Form:
    """One variant of a kernel that Triton compiles. `key` is unique."""

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
    """Return the form that Triton compiles for a launch."""
    kernel = launch.kernel
    backend, bind = _binder(kernel, target)
    keywords = {
        **FUSION,
        **launch.constants,
        "debug": kernel.debug or triton.knobs.runtime.debug,
        "instrumentation_mode": triton.knobs.compilation.instrumentation_mode,
    }
    arguments, specialised, _ = bind(*launch.arguments, **keywords)
    options, signature, constants, attributes = kernel._pack_args(
        backend, keywords, arguments, specialised, None
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


def recorded_launches(
    networks: Mapping[str, nn.Module],
    specs: Mapping[str, ModelSpec],
    arch: Architecture,
    *,
    has_slots: bool = False,
    bank: Bank | None = None,
) -> list[Launch]:
    """Return the launches of networks on the meta device, with a `bank` also those of calls with
    LoRAs. Forms do not depend on a call's rows. Of the size, only two facts matter: odd latents are
    stretched where even ones are doubled, and maps may be in slots."""
    latent = arch.default_side // arch.vae_scale

    def run(name: str, axes: Mapping[str, int]) -> None:
        network, inputs = networks[name], meta_inputs(specs[name], axes)
        network(*inputs)
        if bank is None:
            return
        for graph in {each[name] for each in VARIANTS.values() if name in each}:
            pages, scales = torch.zeros(2, 2, 1, device="meta")
            with adapted(bank_of(graph, network, bank), pages.long(), scales):
                network(*inputs)

    with torch.inference_mode(), noted() as launches:
        for name in networks:
            for side in (latent, latent + 1):
                sizes = {"rows": 2, "batch": 1, "tokens": CHUNK, **image_axes(arch, side, side)}
                axes = sizes | {"latent_h": side, "latent_w": side}
                run(name, axes)
            if has_slots and name in STEPS:
                axes = {"rows": 2, "tokens": CHUNK, "latent_h": 1, "latent_w": latent**2}
                sides = torch.empty(2, 2, dtype=torch.int32, device="meta")
                with in_slots(latent**2, sides):
                    run(name, axes)
    return launches


def forms_of(
    launches: Iterable[Launch], target: GPUTarget, fitting: Callable[[TileProblem], Sequence[Tile]]
) -> list[Form]:
    """Return the forms of these launches, of products in every tile that fits. The usual tile comes
    first."""
    distinct = {form_of(launch, target): launch for launch in launches}
    tiled = (each for launch in distinct.values() for each in in_every_tile(launch, fitting))
    return list(dict.fromkeys(form_of(each, target) for each in tiled))


def in_every_tile(
    launch: Launch, fitting: Callable[[TileProblem], Sequence[Tile]]
) -> Iterator[Launch]:
    if launch.name not in PRODUCTS:
        yield launch
        return
    given = launch.by_name
    is_gated = launch.name == "_gated_product"
    problem = TileProblem(
        str(getattr(given["x"], "base", given["x"]).dtype).removeprefix("torch."),
        taps=1,
        channels=1,
        out_channels=1,
        count=1,
        has_residual=given.get("residual") is not None,
        is_gated=is_gated,
        places=0 if given.get("sides") is None else 2 * LINE,
    )
    for tile in fitting(problem):
        names = ("M", "N", "K", "num_warps", "num_stages")
        constants = {**launch.constants, **dict(zip(names, astuple(tile), strict=True))}
        lines = [2, tile.n // 2] if is_gated else [tile.n]
        blocks = iter(([tile.m, tile.k], [*lines, tile.k]))
        arguments = tuple(
            replace(each, block_shape=next(blocks)) if isinstance(each, TensorDescriptor) else each
            for each in launch.arguments
        )
        yield replace(launch, arguments=arguments, constants=constants)


@contextmanager
def compiled_ahead(list_forms: Callable[[], tuple[list[Form], GPUTarget]]) -> Iterator[None]:
    """Compile the forms that Triton's cache lacks, in other processes, and wait for them at the end
    of the block. Failures are logged; such forms are compiled at their first use."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        count_compilations()
        forms, target = list_forms()
        missing = [form for form in forms if not is_cached(form, target)]
        shares = [share for i in range(_processes()) if (share := missing[i :: _processes()])]
        processes = [_process() for _ in shares]
    except Exception as error:
        log.warning("kernels are compiled at their first use: %s: %s", type(error).__name__, error)
        missing, shares, processes = [], [], []
    progress = Progress(len(missing))
    with ThreadPoolExecutor(max(len(shares), 1)) as threads:
        try:
            for process, share in zip(processes, shares, strict=True):
                threads.submit(progress.follow, process, pickle.dumps((share, target)))
            yield
        except BaseException:
            for process in processes:
                process.kill()
            raise
    if failed := progress.total - len(progress.compiled):
        log.warning("%d kernels are compiled at their first use: %s", failed, progress.message)


@dataclass
class Progress:
    """The progress of compilation in other processes."""

    total: int
    compiled: list[str] = field(default_factory=list)
    message: str = ""

    def follow(self, process: subprocess.Popen[bytes], order: bytes) -> None:
        """Send a process its order, and read its output until it ends."""
        assert process.stdin and process.stdout
        with process:
            try:
                process.stdin.write(order)
                process.stdin.close()
            except OSError:
                # The process ended early; its output says why.
                pass
            for line in process.stdout:
                text = line.decode(errors="replace").strip()
                if text == COMPILED:
                    self.compiled.append(text)
                    if (done := len(self.compiled)) % LOGGED_EVERY == 0 or done == self.total:
                        log.info("compiling kernels: %d of %d", done, self.total)
                elif text:
                    self.message = text


def _processes() -> int:
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)))


def _process() -> subprocess.Popen[bytes]:
    # multiprocessing would run the caller's main module again in a spawned process.
    changes = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        # The process needs no GPU, and a CUDA context would take memory.
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "engines.pytorch.forms"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **changes},
    )


def target_of(device: torch.device) -> GPUTarget:
    with torch.cuda.device(device):
        return triton.runtime.driver.active.get_current_target()


def is_cached(form: Form, target: GPUTarget) -> bool:
    backend = make_backend(target)
    options = backend.parse_options(dict(form.options))
    key = get_cache_key(form.source, backend, options, get_cache_invalidating_env_vars())
    files = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return bool(files.get_group(f"{form.kernel}.json"))


def compiled_forms() -> int:
    """Return how many forms this process has compiled since `count_compilations`. Forms from
    Triton's cache and forms that other processes compiled do not count."""
    return len(_compiled)


def count_compilations() -> None:
    triton.knobs.compilation.listener = _note_compilation


_compiled: list[str] = []


def _note_compilation(*, src: Any, cache_hit: bool, **_: Any) -> None:
    if not cache_hit:
        _compiled.append(src.name)


def main() -> int:
    """Compile the forms that standard input contains."""
    forms, target = pickle.load(sys.stdin.buffer)
    for form in forms:
        try:
            compile_form(form, target)
            print(COMPILED, flush=True)
        except Exception as error:
            print(f"{form.kernel}: {' '.join(str(error).split())[-200:]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
