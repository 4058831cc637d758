"""`sdxl render`: text to picture files, from a terminal or a script.

It checks as much as possible before the model is loaded, and knows neither Ray nor HTTP.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from engines.flags import ModelFlags, add_engine_flags, given_engine_flags
from sdxl.arguments import (
    Parser,
    add_count_flag,
    add_option,
    add_picture_flags,
    given_params,
    given_provenance,
    model_with,
)
from sdxl.attachments import with_tags
from sdxl.catalogue import FILE_KEYS, AdapterFile
from sdxl.files import prepare_folder, write_atomic
from sdxl.parameter import FEW_STEPS
from sdxl.params import DRAWN_SEEDS, PICTURED, GenerationParams, InvalidParams
from sdxl.presets import preset_named
from sdxl.provenance import Provenance
from sdxl.source import DIGESTS, GivenImage
from serve.render import input_pictures, terminal
from serve.render.destination import STDOUT, SUFFIXES, Destination, format_of
from serve.render.progress_display import RenderDisplay

if TYPE_CHECKING:
    from sdxl.images import Pixels
    from sdxl.pipeline import Result, WithPictures

DEFAULT_MODEL = "mini"
MAX_IMAGES = 10_000
COMMON_FLAGS = (
    *("--out", "--n", "--image", "--mask", "--from", "--model"),
    *("--negative-prompt", "--width", "--height", "--steps", "--guidance", "--seed"),
    *("--scheduler", "--lora", "--quality"),
)
CONTROLS = "controls"
NOUNS = {CONTROLS: ("ControlNet", "map"), "image_prompts": ("image prompt", "picture")}
"""What messages call an entry of a list, and its picture."""


class RenderFailed(RuntimeError):
    """Some images of a run failed."""


@dataclass(frozen=True)
class RenderSpec(ModelFlags):
    """One command's request, checked as far as possible without the model."""

    requests: tuple[GenerationParams, ...]
    provenance: Provenance
    destination: Destination
    sheet: Path | None
    is_json: bool
    image: GivenImage | None = None
    preview: str = terminal.AUTO
    files: Mapping[str, Any] = field(default_factory=dict)
    """with --from: digests of the picture's LoRAs and other files, by keys of its metadata"""
    maps: Mapping[str, bytes] = field(default_factory=dict)
    """pictures of ControlNets and image prompts by digest"""


def main(argv: Sequence[str]) -> int:
    order = read_order(build_parser().parse_args(argv))
    # Query the terminal before another thread starts: an interrupt must reach this thread.
    shows = terminal.find(order.preview, order.is_json or not sys.stdout.isatty())
    # Imported here: loading PyTorch takes seconds, and a typo in a flag is reported before.
    from sdxl.deepcache import spoils
    from sdxl.images import check_metadata

    # This raises if the certificate cannot sign.
    _ = order.provenance.sign
    pipeline = order.load(refiner=order.requests[0].refiner)
    order = replace(order, model=pipeline.checkpoint.origin or order.model)
    image = order.image
    sized = (
        [image.sized(each, pipeline.sizes) for each in order.requests] if image else order.requests
    )
    requests = [pipeline.check(request) for request in sized]
    print_changed_files(order, [file for each in requests for file, *_ in pipeline.uses(each)])
    for request in requests:
        check_metadata(_metadata(order, request, {}), order.destination.format)
    asked = with_pictures(order, requests)
    if any(map(spoils, requests)):
        hint = f"DeepCache hurts quality below {FEW_STEPS} steps; use --cache-interval 1"
        print(f"sdxl render: {hint}", file=sys.stderr)
    pictures: dict[int, tuple[Pixels, str]] = {}
    failures: list[Exception] = []
    total = sum(request.all_steps for request in requests)
    began = time.perf_counter()
    with RenderDisplay(total, shows) as display:
        for result in pipeline.stream(asked, display.ticked, display.on_forming):
            if result.error is not None:
                failures.append(result.error)
                continue
            pixels, path = save(result, order)
            display.finished(pixels)
            report(result, path, order)
            caption = with_tags(result.params.prompt, result.params.loras or ())
            pictures[result.index] = pixels, caption
    if order.sheet is not None and pictures:
        save_sheet(order.sheet, [pictures[index] for index in sorted(pictures)])
    if len(pictures) > 1 and not order.is_json:
        seconds = time.perf_counter() - began
        rate = len(pictures) / seconds
        print(
            f"{len(pictures)} images in {seconds:.2f} s, {rate:.2f} images/s", file=lines_to(order)
        )
    if failures:
        raise RenderFailed(
            f"{len(failures)} of {len(requests)} image{'s' * (len(requests) != 1)} failed: "
            f"{failures[0]}"
        ) from failures[0]
    return 0


def with_pictures(
    order: RenderSpec, requests: Sequence[GenerationParams]
) -> Sequence[GenerationParams | WithPictures]:
    """Add the pictures to the requests. All requests have the same size, ControlNets and image
    prompts. Raise InvalidParams for wrong pictures."""
    from sdxl.control_maps import check_pictures
    from sdxl.pipeline import WithPictures

    source = order.image.source(requests[0]) if order.image else None
    for leg in requests[0].legs:
        check_pictures(leg, order.maps, source)
    if source is None and not order.maps:
        return requests
    return [WithPictures(each, source, order.maps) for each in requests]


def print_changed_files(order: RenderSpec, files: Iterable[AdapterFile]) -> None:
    """Report files that differ from those of the picture to make again."""
    for file in dict.fromkeys(files):
        match order.files.get(FILE_KEYS[file.kind]):
            case {file.name: {"sha256": str(digest)}} if digest != file.sha256:
                print(f"sdxl render: {file.name!r} is not the picture's file", file=sys.stderr)


def build_parser() -> Parser:
    parser = Parser(
        prog="sdxl render",
        description="Make pictures from text, or from images.",
        common=COMMON_FLAGS,
    )
    text = "what to draw; - reads prompts from stdin, one a line"
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help=text)
    text = "folder, file, or - (default %(default)s)"
    parser.add_argument("-o", "--out", default="out", metavar="PATH", help=text)
    add_count_flag(parser, "images a prompt")
    add = partial(add_option, parser)
    add("--format", None, f"{', '.join(SUFFIXES)} (default: by the file's name, else png)")
    add("--sheet", None, "also make one picture of all, with captions", "FILE")
    add("--image", None, "edit this image; --strength sets how much", "FILE")
    add("--mask", None, "edit only where this image is white or transparent", "FILE")
    add("--from", None, "make this picture again; flags change it", "IMAGE", dest="source")
    kinds = ", ".join(terminal.PREVIEWS)
    add("--preview", terminal.AUTO, f"show the forming picture in the terminal: {kinds}", "KIND")
    add("--json", False, "print a JSON object for each image on stdout", dest="is_json")
    add_engine_flags(parser.add_argument_group("model"), f"(default {DEFAULT_MODEL})")
    add_picture_flags(parser)
    return parser


def read_order(options: argparse.Namespace) -> RenderSpec:
    stored = stored_params(options.source) if options.source else {}
    stored_model = stored.pop("model", None)
    files = {key: stored.pop(key, None) for key in FILE_KEYS.values()}
    image = input_pictures.read_image(options.image, options.mask)
    digests = [stored.pop(name, None) for name in DIGESTS]
    if any(digests) and image is None:
        needed = f"needs --image, which the picture was made from ({DIGESTS[0]} {digests[0]})"
        raise InvalidParams("from", options.source, needed)
    if options.format not in (None, *SUFFIXES):
        raise InvalidParams.unknown("format", options.format, SUFFIXES)
    given = read_prompts(options.prompts)
    if options.is_json and options.out == STDOUT:
        raise InvalidParams("out", STDOUT, "must be a file or a folder: --json writes to stdout")
    prompts = given or ([stored.get("prompt", "")] if stored else [])
    if not prompts:
        raise InvalidParams("prompt", None, "needs at least one, or --from IMAGE")
    if not 1 <= options.n <= MAX_IMAGES // len(prompts):
        most = f"must be 1 to {MAX_IMAGES // len(prompts)} for {len(prompts)} prompts"
        raise InvalidParams("n", options.n, most)
    strength = stored.get("strength", image.edit_strength if image else None)
    is_edit, maps = image is not None, dict[str, bytes]()
    lists = {name: read_list(name, options, stored, maps, is_edit=is_edit) for name in PICTURED}
    given_values = with_quality(options, stored_model, strength)
    values = {**stored, **given_values, **lists}
    requests = [
        each
        for prompt in prompts
        for each in numbered(params_for({**values, "prompt": prompt}, image), options.n)
    ]
    sheet = prepare_sheet(options.sheet)
    return RenderSpec(
        **{**given_engine_flags(options), "model": named_model(options, stored_model)},
        requests=tuple(requests),
        provenance=given_provenance(options),
        destination=Destination.prepare(options.out, options.format, len(requests), sheet),
        sheet=sheet,
        is_json=options.is_json,
        image=image,
        preview=terminal.check(options.preview),
        files=files,
        maps=maps,
    )


def with_quality(
    options: argparse.Namespace, stored_model: str | None, strength: float | None
) -> dict[str, Any]:
    """Merge the given flags with the parameters of --quality; `strength` is an edit's default."""
    given = given_params(options)
    if not options.quality:
        return given
    # Imported here, since it loads much.
    from sdxl.checkpoint import find

    presets = find(named_model(options, stored_model)).presets
    return preset_named(presets, options.quality).beside(given, edit_strength=strength)


def named_model(options: argparse.Namespace, stored_model: str | None) -> str:
    named = options.model or model_of_picture(stored_model, options.source) or DEFAULT_MODEL
    return model_with(named, options.vae)


def read_list(
    field: str,
    options: argparse.Namespace,
    stored: Mapping[str, Any],
    files: dict[str, bytes],
    *,
    is_edit: bool,
) -> tuple[Any, ...] | None:
    """Return the ControlNets or image prompts of flags and of the picture to make again, which does
    not contain their pictures; add their files. A ControlNet's map may be the edited image."""
    noun, picture = NOUNS[field]
    may_lack = is_edit and field == CONTROLS
    kept = PICTURED[field].read_list(stored.get(field) or ())
    given: Sequence[Any] | None = getattr(options, field, None)
    if given is None:
        if missing := [each for each in kept if each.image or not may_lack]:
            flags = input_pictures.needed_flags(field, missing)
            raise InvalidParams("from", options.source, f"needs the {picture}s again: {flags}")
        return kept or None
    entries, pictures = input_pictures.read_pictures(field, given, input_pictures.read_file)
    files |= pictures
    without = next((each.name for each in entries if not each.image), None)
    if without is not None and not may_lack:
        needed = f"with {without!r}: needs the file of its {picture}, {without}=FILE"
        needed += ", or --image" if field == CONTROLS else ""
        raise InvalidParams(field, None, needed)
    names = {each.name for each in entries}
    if left := ", ".join(each.name for each in kept if each.name not in names):
        print(f"sdxl render: {options.source}: left out: {noun} {left}", file=sys.stderr)
    return input_pictures.filled(entries, kept)


def params_for(values: dict[str, Any], image: GivenImage | None) -> GenerationParams:
    params = GenerationParams.from_dict(values)
    if image is not None:
        params.for_edit(has_mask=image.mask is not None)
    else:
        params.check_plain()
    return params


def read_prompts(arguments: Sequence[str]) -> list[str]:
    """Return the prompts; `-` stands for the lines of stdin."""
    return [
        prompt
        for argument in arguments
        for prompt in (stdin_lines() if argument == "-" else [argument])
    ]


def stdin_lines() -> list[str]:
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidParams("prompt", "stdin", f"must hold UTF-8 text ({error.reason})") from error
    return [line for line in map(str.strip, text.split("\n")) if line]


def stored_params(source: str) -> dict[str, Any]:
    from sdxl.images import NoParameters, read_parameters

    try:
        data = Path(source).read_bytes()
    except OSError as error:
        needed = f"must be a picture with its parameters ({error.strerror})"
        raise InvalidParams("from", source, needed) from error
    try:
        stored = read_parameters(data)
        if not isinstance(stored.get("model"), str | None):
            raise NoParameters("its model is not a name")
        return stored
    except NoParameters as error:
        if params := foreign_params(data, source):
            return params
        needed = f"must be a picture with its parameters ({error})"
        raise InvalidParams("from", source, needed) from error


def foreign_params(data: bytes, source: str) -> dict[str, Any]:
    """Return the known parameters in a picture of stable-diffusion-webui or ComfyUI; print the
    others. The model is ignored: other programs' file names mean nothing here."""
    from sdxl.infotext import read_metadata
    from sdxl.picture_files import BrokenPicture, read_texts

    try:
        infotext = read_metadata(read_texts(data))
    except (BrokenPicture, ValueError):
        return {}
    if infotext.unread:
        print(f"sdxl render: {source}: left out: {'; '.join(infotext.unread)}", file=sys.stderr)
    return infotext.params


def model_of_picture(model: str | None, source: str) -> str | None:
    """Return a picture's model if it is on this machine: a picture's sender must not cause a
    download."""
    from sdxl.model_names import is_here

    if model is None or is_here(model):
        return model
    needed = f"needs --model: the picture's model {model!r} is not here"
    raise InvalidParams("from", source, needed)


def numbered(params: GenerationParams, n: int) -> Iterator[GenerationParams]:
    first = secrets.randbelow(DRAWN_SEEDS) if params.seed is None else params.seed
    return (params.picture(i, first) for i in range(n))


def prepare_sheet(name: str | None) -> Path | None:
    if name is None:
        return None
    path = Path(name)
    if format_of(path) is None or path.is_dir():
        raise InvalidParams("sheet", name, "must be a file name that ends in .png, .jpg or .webp")
    prepare_folder(path.parent)
    return path


def save(result: Result, order: RenderSpec) -> tuple[Pixels, Path]:
    from sdxl.images import encode, pasted, to_pixels

    assert result.image is not None
    pixels = to_pixels(result.image)
    if result.source is not None:
        pixels = pasted(pixels, result.source)
    format, marks = order.destination.format, order.provenance
    pixels = marks.mark(pixels)
    metadata = _metadata(order, result.params, result.files)
    path = order.destination.path(result.params, metadata)
    file = marks.sign(encode(pixels, format, metadata, xmp=marks.xmp), format)
    if order.destination.is_stdout:
        sys.stdout.buffer.write(file)
    else:
        write_atomic(path, file)
    return pixels, path


def report(result: Result, path: Path, order: RenderSpec) -> None:
    from tqdm import tqdm

    if order.is_json:
        line = json.dumps(as_json(result, path, order))
    else:
        # Images that are made together take the same time; the last line has their rate.
        took = f"  {result.timings['denoise_s']:.2f} s" if len(order.requests) == 1 else ""
        line = f"{path}  seed {result.params.seed}{took}"
    # tqdm clears its bar first, then writes to stdout.
    tqdm.write(line, file=lines_to(order))


def lines_to(order: RenderSpec) -> TextIO:
    """Return the stream for lines of text: stdout may carry an image."""
    return sys.stderr if order.destination.is_stdout else sys.stdout


def as_json(result: Result, path: Path, order: RenderSpec) -> dict[str, Any]:
    """Return a result as JSON; `deep_steps` is a count, `deep_plan` lists the deep steps."""
    from sdxl.images import stored_fields

    params = stored_fields(result.params.as_dict())
    plan = params.pop("deep_steps")
    return {
        "file": str(path),
        "index": result.index,
        "model": order.model,
        "backend": order.backend,
        **params,
        "deep_plan": plan,
        **{name: round(seconds, 6) for name, seconds in result.timings.items()},
        "deep_steps": result.deep_steps,
        "shallow_steps": result.shallow_steps,
    }


def save_sheet(path: Path, pictures: list[tuple[Pixels, str]]) -> None:
    from PIL import Image

    from sdxl.picture_files import file_of
    from serve.render.contact_sheet import contact_sheet

    sheet = Image.fromarray(contact_sheet(pictures))
    write_atomic(path, file_of(sheet, format_of(path) or "PNG", quality=95))


def _metadata(
    order: RenderSpec, params: GenerationParams, files: Mapping[str, Any]
) -> dict[str, Any]:
    digests = order.image.digests if order.image else {}
    return {**params.as_dict(), "model": order.model, **digests, **files}
