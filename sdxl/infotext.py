"""Writes and reads stable-diffusion-webui's `parameters` text, and reads ComfyUI's graph. It knows
no tensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

from sdxl.attachments import Lora, merged, take_tags, with_tags
from sdxl.catalogue import FILE_KEYS
from sdxl.control_texts import UNIT, prompt_text, read_unit, unit_text
from sdxl.controls import Control
from sdxl.image_prompts import ImagePrompt
from sdxl.params import PARAMETERS, InvalidParams
from sdxl.scheduler_names import OTHER_NAMES, OWN_SCHEDULES, SCHEDULE_LABELS, SCHEDULERS

COMMON_FACTS = ("steps", "scheduler", "guidance", "seed")
"""the first facts of the last line, in the usual order"""
PROMPTS = ("prompt", "negative_prompt")
NEGATIVE = "Negative prompt:"
FACT = re.compile(r'(?<![\w \-/])[ \-/]*+(\w[\w \-/]++):\s*("(?:\\.|[^\\"])++"|[^,]*)(?:,|$)')
"""Begins only where a run of a name's characters does, so that nothing is scanned twice."""
FEWEST_FACTS = 3
SAMPLER, SCHEDULE = "Sampler", "Schedule type"
UPSCALE, HIRES_STRENGTH, HIRES_STEPS = "Hires upscale", "Hires strength", "Hires steps"
STRENGTH = "Denoising strength"
LORA_HASHES, EMBEDDING_HASHES = "Lora hashes", "TI hashes"
CONTROL_APPLIERS = ("ControlNetApply", "ControlNetApplyAdvanced")
CONTROL_LOADERS = ("ControlNetLoader", "DiffControlNetLoader")
LORA_LOADERS = ("LoraLoader", "LoraLoaderModelOnly")
AUTOMATIC, PLAIN = "automatic", ("", "normal", "simple")
SCHEDULES = {label.lower(): levels for levels, label in SCHEDULE_LABELS.items()}
PLAIN_NODES = (
    *("CLIPTextEncode", "EmptyLatentImage", "VAEDecode", "SaveImage", "PreviewImage"),
    *("CheckpointLoaderSimple", "VAELoader"),
)
MAX_DEPTH = 32
"""the most nodes of ComfyUI's graph on the path from the sampler to a text or model"""


@dataclass
class FoundParameters:
    """The supported parameters in a text, and the unsupported facts."""

    params: dict[str, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


def parameters_text(params: Mapping[str, Any]) -> str:
    """Return the prompt, the negative prompt and a line of facts, as other programs read them."""
    loras = [Lora.read(each, "loras") for each in params.get("loras") or ()]
    lines = [with_tags(params["prompt"], loras)]
    if params.get("negative_prompt"):
        lines.append(f"{NEGATIVE} {params['negative_prompt']}")
    lines.append(", ".join(f"{name}: {_quoted(value)}" for name, value in _facts(params)))
    return "\n".join(lines)


def read_text(text: str) -> FoundParameters:
    """Read a `parameters` text of any program."""
    *lines, last = text.strip().split("\n")
    facts = dict(FACT.findall(last))
    if len(facts) < FEWEST_FACTS:
        lines, facts = [*lines, last], {}
    prompt, mark, negative = "\n".join(lines).partition(NEGATIVE)
    found = FoundParameters({"prompt": prompt.strip()})
    if mark:
        found.params["negative_prompt"] = negative.strip()
    _read_tags(found)
    if "loras" in found.params:
        facts.pop(LORA_HASHES, None)
    _read_facts({name: _unquoted(value.strip()) for name, value in facts.items()}, found)
    return found


def scheduler_of(sampler: str, schedule: str = "") -> str | None:
    """Return the scheduler's name for another program's sampler and schedule, or None."""
    schedule = schedule.strip().lower().replace("_", " ")
    name = OTHER_NAMES.get(sampler.strip().lower())
    if name is None or schedule not in (AUTOMATIC, *PLAIN, *SCHEDULES):
        return None
    scheduler = SCHEDULERS[name]
    automatic = OWN_SCHEDULES.get(scheduler.label, "") if schedule == AUTOMATIC else ""
    # Older versions write the schedule into the sampler's name.
    levels = scheduler.levels or automatic or SCHEDULES.get(schedule, "")
    names = {(each.label, each.levels): name for name, each in SCHEDULERS.items()}
    return names.get((scheduler.label, levels))


def read_metadata(texts: Mapping[str, str]) -> FoundParameters:
    """Read a picture's text chunks from stable-diffusion-webui (`parameters`) or ComfyUI
    (`prompt`). Raise ValueError if they have no prompt."""
    text = texts.get("parameters", "")
    try:
        graph = json.loads(texts.get("prompt", "{}"))
        # JSON can hold lone surrogates, an answer cannot.
        graph = json.loads(json.dumps(graph, ensure_ascii=False).encode(errors="replace"))
    except RecursionError:
        graph = {}
    found = read_graph(graph) if isinstance(graph, dict) and not text else read_text(text)
    if not found.params.get("prompt"):
        raise ValueError("no prompt")
    return found


def read_graph(graph: Mapping[str, Any]) -> FoundParameters:
    """Read the sampler's inputs in ComfyUI's `prompt` that plain nodes lead to."""
    found = FoundParameters()
    nodes = {key: node for key, node in graph.items() if isinstance(node, dict)}
    samplers = [n for n in nodes.values() if str(n.get("class_type", "")).startswith("KSampler")]
    if not samplers:
        return found
    inputs = _inputs(samplers[0])
    for key, name in (("seed", "seed"), ("noise_seed", "seed"), ("steps", "steps")):
        if isinstance(inputs.get(key), int):
            found.params[name] = inputs[key]
    if (guidance := _number(inputs.get("cfg"))) is not None:
        found.params["guidance"] = guidance
    for key, name in (("positive", "prompt"), ("negative", "negative_prompt")):
        if text := _text_of(nodes, inputs.get(key)):
            found.params[name] = text
    loras = dict(_loras_before(nodes, inputs.get("model")))
    _add_loras(reversed(loras.values()), found)
    controls = list(_controls_before(nodes, inputs.get("positive")))
    if controls:
        found.params["controls"] = [asdict(control) for _, control in reversed(controls)]
    size = _inputs(_node(nodes, inputs.get("latent_image")))
    for side in ("width", "height"):
        if isinstance(size.get(side), int):
            found.params[side] = size[side]
    _read_comfy_sampler(inputs, found)
    read = {*loras, *(key for keys, _ in controls for key in keys)}
    others = [node for key, node in nodes.items() if key not in read]
    found.unread += _unread_nodes(others, samplers[0])
    return found


def without_hash(title: str) -> str:
    """Return a model's name as stable-diffusion-webui shows it, without the hash after it."""
    return re.sub(r" \[[0-9a-f]+\]$", "", title.strip())


def _facts(params: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in COMMON_FACTS:
        yield from _fact(name, params)
    yield "Size", f"{params['width']}x{params['height']}"
    if params.get("model"):
        yield "Model", Path(params["model"]).name
    for name in PARAMETERS:
        if name not in COMMON_FACTS:
            yield from _fact(name, params)
    if params.get("upscale_strength") is not None:
        schedule = params.get("upscale_steps") or params["steps"]
        yield HIRES_STEPS, str(int(schedule * params["upscale_strength"]))
    hashes = {
        kind: {name: file.get("short", "") for name, file in (params.get(key) or {}).items()}
        for kind, key in FILE_KEYS.items()
    }
    for label, files in ((LORA_HASHES, hashes["lora"]), (EMBEDDING_HASHES, hashes["embedding"])):
        if files:
            yield label, ", ".join(f"{name}: {hash}" for name, hash in files.items())
    controls = [Control.read(each, "controls") for each in params.get("controls") or ()]
    prompts = [ImagePrompt.read(e, "image_prompts") for e in params.get("image_prompts") or ()]
    units = [unit_text(each, hashes["control"].get(each.name, "")) for each in controls]
    units += [prompt_text(each, hashes["image"].get(each.name, "")) for each in prompts]
    for number, text in enumerate(units):
        yield f"{UNIT}{number}", text


def _fact(name: str, params: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    label, value = PARAMETERS[name].infotext, params.get(name)
    if not label or value is None:
        return
    if name == "scheduler":
        scheduler = SCHEDULERS[value]
        yield label, scheduler.label
        if scheduler.levels:
            yield SCHEDULE, SCHEDULE_LABELS[scheduler.levels]
    elif name == "upscale_strength" and params.get("strength") is None:
        yield STRENGTH, _text(value)
    elif name == "upscaler":
        yield label, value.capitalize()
    else:
        yield label, _text(value)


def _text(value: Any) -> str:
    match value:
        case float():
            return f"{value:g}"
        case list() | tuple():
            return " ".join(map(_text, value))
    return str(value)


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if set(',:\n"') & set(value) else value


def _unquoted(value: str) -> str:
    try:
        text = str(json.loads(value)) if value.startswith('"') else value
        text.encode()
    except ValueError:
        # Not JSON, or a lone surrogate.
        return value
    return text


def _read_tags(found: FoundParameters) -> None:
    """Read the LoRAs in the prompts. Prompts with a wrong tag stay as they are."""
    try:
        texts = {n: take_tags(found.params[n], n) for n in PROMPTS if n in found.params}
    except InvalidParams:
        return
    found.params |= {name: text for name, (text, _) in texts.items()}
    _add_loras((lora for _, loras in texts.values() for lora in loras), found)


def _add_loras(loras: Iterable[Lora], found: FoundParameters) -> None:
    if sums := merged(loras):
        found.params["loras"] = [asdict(lora) for lora in sums]


def _read_facts(facts: dict[str, str], found: FoundParameters) -> None:
    sampler, schedule = facts.pop(SAMPLER, ""), facts.pop(SCHEDULE, "")
    if sampler:
        if name := scheduler_of(sampler, schedule):
            found.params["scheduler"] = name
        else:
            found.unread.append(f"{SAMPLER}: {sampler} {schedule}".rstrip())
    if match := re.fullmatch(r"(\d{1,5})x(\d{1,5})", facts.pop("Size", "")):
        found.params |= {"width": int(match[1]), "height": int(match[2])}
    if UPSCALE in facts:
        _read_hires(facts, found)
    _read_units({name: facts.pop(name) for name in list(facts) if name.startswith(UNIT)}, found)
    by_name = {each.infotext: each for each in PARAMETERS.values() if each.infotext}
    for name, value in facts.items():
        each = by_name.get(name)
        try:
            if each is None:
                raise ValueError
            listed = value.replace(" ", ",") if each.kind is tuple else value
            if name == PARAMETERS["refiner"].infotext:
                listed = without_hash(value)
            choice = listed.lower() if each.choices else listed
            if each.choices and choice not in each.choices:
                raise ValueError
            found.params[each.name] = each.parse(choice)
        except ValueError:
            found.unread.append(f"{name}: {value}")


def _read_units(units: Mapping[str, str], found: FoundParameters) -> None:
    """Read the ControlNets and image prompts. Their pictures are not in the text."""
    for name, text in units.items():
        try:
            unit, unread = read_unit(text)
        except (OverflowError, ValueError):
            unread = [text]
        else:
            field = "controls" if isinstance(unit, Control) else "image_prompts"
            found.params.setdefault(field, []).append(asdict(unit))
        found.unread += [f"{name}: {each}" for each in unread]


def _read_hires(facts: dict[str, str], found: FoundParameters) -> None:
    """Read the second leg of an upscaled picture. If the text has only one strength, it is the
    second leg's. The second leg's steps default to the first leg's."""
    if HIRES_STRENGTH not in facts and STRENGTH in facts:
        facts[HIRES_STRENGTH] = facts.pop(STRENGTH)
    try:
        taken = int(facts.pop(HIRES_STEPS, "") or facts["Steps"])
        strength = float(facts[HIRES_STRENGTH])
        found.params["upscale_steps"] = schedule_steps(taken, strength)
    except (KeyError, ValueError, ZeroDivisionError, OverflowError, StopIteration):
        found.unread.append(HIRES_STEPS)


def schedule_steps(taken: int, strength: float) -> int:
    """Return the fewest steps of a schedule of which `strength` takes `taken` steps."""
    steps = max(round(taken / strength), 1)
    return next(n for n in range(max(steps - 1, 1), steps + 3) if int(n * strength) >= taken)


def _read_comfy_sampler(inputs: Mapping[str, Any], found: FoundParameters) -> None:
    sampler, schedule = str(inputs.get("sampler_name", "")), str(inputs.get("scheduler", ""))
    if not sampler:
        return
    label = next((each.label for each in SCHEDULERS.values() if each.comfy == sampler), None)
    name = scheduler_of(label, schedule) if label and schedule else None
    if name:
        found.params["scheduler"] = name
    else:
        found.unread.append(f"{SAMPLER}: {sampler} {schedule}".rstrip())


def _inputs(node: Mapping[str, Any] | None) -> Mapping[str, Any]:
    inputs = (node or {}).get("inputs")
    return inputs if isinstance(inputs, dict) else {}


def _number(value: object) -> float | None:
    """Return a finite number; None for anything else."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _node(nodes: Mapping[str, Any], link: object) -> Mapping[str, Any] | None:
    """Return the node of a link. A link is a list of the node's key and the output's number."""
    return nodes.get(str(link[0])) if isinstance(link, list) and link else None


def _text_of(nodes: Mapping[str, Any], link: object) -> str:
    for _ in range(MAX_DEPTH):
        inputs = _inputs(_node(nodes, link))
        names = ("text", "text_g", "conditioning", _side(link))
        link = next((inputs[n] for n in names if n in inputs), None)
        if isinstance(link, str):
            return link
    return ""


def _side(link: object) -> str:
    """Return the input of ControlNetApplyAdvanced that belongs to an output."""
    return "negative" if isinstance(link, list) and link[1:] == [1] else "positive"


def _loras_before(nodes: Mapping[str, Any], link: object) -> Iterator[tuple[str, Lora]]:
    """Yield the LoRAs between the sampler and its model, each with its node's key."""
    for _ in range(MAX_DEPTH):
        node = _node(nodes, link)
        if node is None or not isinstance(link, list):
            return
        inputs = _inputs(node)
        strengths = [inputs.get("strength_model"), inputs.get("strength_clip", 0.0)]
        weights = [each for each in map(_number, strengths) if each is not None]
        if node.get("class_type") in LORA_LOADERS and len(weights) == len(strengths):
            path = PureWindowsPath(str(inputs.get("lora_name"))).as_posix()
            yield str(link[0]), Lora(path.removesuffix(".safetensors"), *weights)
        link = inputs.get("model")


def _controls_before(
    nodes: Mapping[str, Any], link: object
) -> Iterator[tuple[tuple[str, str], Control]]:
    """Yield the ControlNets between the sampler and its prompt, with the keys of their nodes."""
    for _ in range(MAX_DEPTH):
        node = _node(nodes, link)
        if node is None or not isinstance(link, list):
            return
        inputs = _inputs(node)
        loader = inputs.get("control_net")
        control = _control_of(inputs, _node(nodes, loader))
        if node.get("class_type") in CONTROL_APPLIERS and control and isinstance(loader, list):
            yield (str(link[0]), str(loader[0])), control
        link = inputs.get("conditioning", inputs.get(_side(link)))


def _control_of(inputs: Mapping[str, Any], loader: Mapping[str, Any] | None) -> Control | None:
    numbers = [inputs.get("strength"), inputs.get("start_percent", 0), inputs.get("end_percent", 1)]
    if not loader or loader.get("class_type") not in CONTROL_LOADERS:
        return None
    path = PureWindowsPath(str(_inputs(loader).get("control_net_name"))).as_posix()
    name = path.removesuffix(".safetensors").removesuffix("/diffusion_pytorch_model")
    try:
        strength, start, end = (float(each) for each in numbers if each is not None)
        control = Control(name, "", strength, start, end)
        control.check("controls")
    except (OverflowError, TypeError, ValueError):
        return None
    return control


def _unread_nodes(nodes: Iterable[Mapping[str, Any]], sampler: Mapping[str, Any]) -> list[str]:
    """Return the nodes without a parameter for their effect."""
    kinds = (str(n.get("class_type", "")) for n in nodes if n is not sampler)
    return sorted({f"node {kind}" for kind in kinds if not kind.startswith(PLAIN_NODES)})
