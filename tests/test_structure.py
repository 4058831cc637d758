"""Rules of the code: allowed imports, names, and the time to start."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Container, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "sdxl": set[str](),
    "engines": {"sdxl"},
    "onnx_export": {"sdxl", "engines"},
    "serve": {"sdxl", "engines", "onnx_export"},
    "eval": {"sdxl", "engines", "onnx_export"},
    "training": {"sdxl", "engines", "onnx_export", "serve"},
}
ROOMS = {
    "serve": ("batch_api", "batch", "render", "front", "llm", "worker", "fleet"),
    "engines": ("pytorch", "trt", "parity", "cuda", "folders"),
    "eval": ("fleet", "gpu", "llm", "mlperf", "speed", "tuning", "quality", "service", "measuring"),
}
"""Each room imports only those after it."""
UNKNOWN = {
    "asyncio": ("asyncio",),
    "clock": ("time",),
    "engines": ("engines", "sdxl.engine"),
    "exports": ("onnx_export.exporter",),
    "files": ("os", "pathlib", "shutil", "sdxl.files"),
    "HTTP": ("fastapi", "http", "httpx", "starlette", "uvicorn"),
    "HTTP server": ("fastapi", "uvicorn"),
    "modules": ("torch.nn",),
    "networks": ("sdxl.networks",),
    "ONNX": ("onnx", "onnx_ir", "onnxruntime"),
    "pictures": ("PIL", "sdxl.images"),
    "policy": ("sdxl.policy",),
    "prompts": ("sdxl.conditioning", "sdxl.prompt"),
    "quantisation": ("onnx_export.quantisation",),
    "Ray": ("ray",),
    "routes": ("fastapi",),
    "runtime": ("onnxruntime", "tensorrt"),
    "schedulers": ("sdxl.schedulers",),
    "settings": ("serve.settings",),
    "TensorRT": ("engines.trt", "tensorrt"),
    "tensors": ("numpy", "torch"),
    "torch": ("torch",),
}
"""Imports that are forbidden for a module whose docstring says that it does not know the topic."""
NOT_KNOWN = re.compile(r"knows (?:no|neither|nothing of) ([^.:;]+)")
ENTRY = ROOT / "sdxl" / "cli.py"
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "base", "misc"}
SHADOWING_NAMES = {"torch", "tensorrt", "onnx", "onnxruntime", "ray", "diffusers"}
MODULES = sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """Return line and dotted name of every import of a file, by statement or `import_module`."""
    return tuple(find_imports(path))


def find_imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, level=level, names=names):
                parts = path.relative_to(ROOT).parts[:-level] if level else ()
                origin = ".".join((*parts, *([module] if module else [])))
                yield from ((node.lineno, f"{origin}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def test_packages_import_only_what_is_below_them() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in MODULES
        for line, name in imports(path)
        if (top := name.partition(".")[0]) in MAY_IMPORT
        and top != (own := path.relative_to(ROOT).parts[0])
        and top not in MAY_IMPORT[own]
    ]
    assert not wrong, "training, serve, eval → onnx_export → engines → sdxl:\n" + "\n".join(wrong)


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_only_what_is_below_them(package: str) -> None:
    rooms = ROOMS[package]
    found = {p.parent.name for p in (ROOT / package).glob("*/__init__.py")}
    assert found == set(rooms), f"rooms of {package}: ROOMS differs from the folders"
    wrong = []
    for room in rooms:
        above = {*rooms[: rooms.index(room)]}
        for path in sorted((ROOT / package / room).rglob("*.py")):
            for line, name in imports(path):
                parts = name.split(".")
                if parts[0] == package and parts[1] in above:
                    wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, " → ".join(rooms) + ":\n" + "\n".join(wrong)


def test_imports_have_no_cycle() -> None:
    """Imports inside functions count too: modules that need each other are one module."""
    by_name = {dotted(path): path for path in MODULES}
    known = {
        name: {module for _, full in imports(path) if (module := module_of(full, by_name))} - {name}
        for name, path in by_name.items()
    }
    try:
        TopologicalSorter(known).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def module_of(name: str, known: Container[str]) -> str | None:
    """Return the module that an imported name is, or that defines the name."""
    parent = name.rpartition(".")[0]
    return name if name in known else parent if parent in known else None


def test_nothing_imports_the_entry() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in MODULES
        for line, name in imports(path)
        if f"{name}.".startswith("sdxl.cli.")
    ]
    assert not wrong, f"sdxl/cli.py is only ever run: {wrong}"


def test_the_entry_imports_only_what_errors_need() -> None:
    names = {name for _, name in imports(ENTRY) if name.startswith("sdxl")}
    assert names <= {"sdxl", "sdxl.params.InvalidParams", "sdxl.suggestions.did_you_mean"}


def test_names_are_not_vague() -> None:
    parts = {path: set(path.relative_to(ROOT).with_suffix("").parts) for path in MODULES}
    vague = [str(path) for path, names in parts.items() if names & VAGUE_NAMES]
    shadowing = [str(path) for path in MODULES if path.stem in SHADOWING_NAMES]
    assert not vague + shadowing


def test_class_names_are_unique() -> None:
    """Names are unique in all packages together."""
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice, f"classes of the same name: {twice}"


def test_every_module_has_a_docstring() -> None:
    undocumented = [
        str(path.relative_to(ROOT)) for path in MODULES if not ast.get_docstring(parsed(path))
    ]
    assert not undocumented, f"modules without a docstring: {undocumented}"


def test_a_module_imports_nothing_that_its_docstring_excludes() -> None:
    wrong = []
    for path in MODULES:
        docstring = " ".join((ast.get_docstring(parsed(path)) or "").split())
        for match in NOT_KNOWN.finditer(docstring):
            for thing in re.split(r",? (?:and|or|nor) (?:no )?|, (?:no )?", match[1]):
                if thing not in UNKNOWN:
                    wrong.append(f"{path.relative_to(ROOT)}: {thing!r} is not in UNKNOWN")
                wrong += [
                    f"{path.relative_to(ROOT)}:{line} says it knows no {thing}, imports {name}"
                    for line, name in imports(path)
                    if any(f"{name}.".startswith(f"{each}.") for each in UNKNOWN.get(thing, ()))
                ]
    assert not wrong, "\n".join(wrong)


LIGHT = ("import sdxl.specs", "import engines", "from sdxl.cli import main; main(['--help'])")


@pytest.mark.parametrize("code", LIGHT)
def test_what_is_light_loads_nothing_heavy(code: str) -> None:
    heavy = ["torch", "numpy", "PIL", "diffusers", "transformers", "onnxruntime", "ray"]
    code += f"\nimport sys; print('loaded', *[name for name in {heavy} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert printed.splitlines()[-1] == "loaded"


def test_every_parameter_is_a_flag_a_field_a_column_a_key_and_a_control() -> None:
    """sdxl/params.py's table is the only source of all of these."""
    import dataclasses

    from sdxl.arguments import POSITIONAL
    from sdxl.params import PARAMETERS, SIZE, GenerationParams
    from serve.batch.command import build_parser as batch_parser
    from serve.batch.reading import COLUMNS, ID
    from serve.batch.results import manifest_columns
    from serve.batch.row_pictures import CONTROL_COLUMNS, PICTURES
    from serve.front.openai_images import FormControl, ImageRequest, PictureFields
    from serve.render.command import build_parser as render_parser

    names = set(PARAMETERS)
    assert names == {f.name for f in dataclasses.fields(GenerationParams)}
    assert names == set(GenerationParams().as_dict()), "keys of a picture's metadata"
    for parser in (render_parser(), batch_parser()):
        groups = (g for g in parser._action_groups if "parameters of" in str(g.title))
        flags = {action.dest for group in groups for action in group._group_actions} - {"quality"}
        assert flags == names - set(POSITIONAL), parser.prog
    fields = {p.client_name for p in PARAMETERS.values()}
    assert set(PictureFields.model_fields) == fields - {SIZE}
    assert fields <= set(ImageRequest.model_fields)
    assert set(COLUMNS) == {p.column for p in PARAMETERS.values()} | {
        ID,
        *PICTURES,
        *CONTROL_COLUMNS,
    }
    assert names <= set(manifest_columns())
    assert [FormControl.of(p).name for p in PARAMETERS.values()] == list(PARAMETERS)


def test_every_scheduler_has_a_solver_and_every_solver_a_name() -> None:
    from sdxl.scheduler_names import SCHEDULE_LABELS, SCHEDULERS
    from sdxl.schedulers.levels import SPREADS
    from sdxl.schedulers.solvers import SOLVERS

    assert {scheduler.solver for scheduler in SCHEDULERS.values()} == set(SOLVERS)
    levels = {scheduler.levels for scheduler in SCHEDULERS.values()}
    assert levels == {"", *SCHEDULE_LABELS} == {"", "trailing", *SPREADS}


def test_the_page_names_no_parameter_whose_control_the_service_describes() -> None:
    from sdxl.params import PARAMETERS

    by_hand = {"prompt", "negative_prompt", "cache_interval", "seed"}
    """Controls that the page defines itself."""
    web = ROOT / "serve" / "web"
    text = "".join(p.read_text(encoding="utf-8") for p in sorted(web.glob("*.js")))
    text += (web / "index.html").read_text(encoding="utf-8")
    named = [
        n for n in PARAMETERS if n not in by_hand | {"width", "height"} and f'name="{n}"' in text
    ]
    assert not named
