"""A plain denoising loop: one image, alone, step after step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from sdxl import schedulers
from sdxl.controls import Window
from sdxl.editing import begin
from sdxl.engine import Engines, call
from sdxl.image_prompts import ImageWindow
from sdxl.inflight import Request
from sdxl.noise import NoiseSource


def denoise(engines: Engines, request: Request, refiner: Engines | None = None) -> Tensor:
    dims = (engines.arch.latent_channels, request.latent_h, request.latent_w)
    noise = NoiseSource(request.seed, dims)
    x, masked = noise.start()[None] * request.table.start, torch.zeros(1, 0, *dims[1:])
    if request.source is not None:
        begun = begin(request.source, request.table, noise, torch.device("cpu"))
        assert begun.kept is None and begun.masked is not None, "only an inpainting checkpoint's"
        x, masked = begun.latents[None], begun.masked[None]
    h = torch.zeros_like(x)
    cache, ready, residuals = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
    cached = 0
    was_refined: bool | None = None
    for number, (row, step) in enumerate(zip(request.table.rows, request.plan, strict=True)):
        if step.is_refined != was_refined:
            was_refined, condition = step.is_refined, request.conditioning
            if step.is_refined:
                assert refiner is not None and condition.refined is not None
                engines, condition, h = refiner, condition.refined, torch.full_like(x, torch.nan)
            spec = engines["unet_prompt"].spec
            conditions = {t.name: getattr(condition, t.name) for t in spec.inputs}
            ready = call(engines["unet_prompt"], engines.arch, conditions)
        coefficients = torch.from_numpy(row).float()[None]
        inputs = {
            "sample": torch.cat([x * coefficients[0, 0], masked], 1).repeat(step.rows, 1, 1, 1),
            "timestep": coefficients[:, 1].repeat(step.rows),
        }
        conditions = {name: tensor[: step.rows] for name, tensor in ready.items()}
        if step.is_deep:
            residuals = residuals_of(engines, request, inputs, number)
            images = images_of(request, number, step.rows)
            given = inputs | conditions | residuals | images
            variant = request.variant._replace(images=int(bool(images)))
            cache = call(engines.of("unet_deep", variant), engines.arch, given)
            predicted, cached = cache.pop("noise"), step.rows
        else:
            assert step.rows <= cached, "no deep step has made the negative row's features"
            kept = {name: tensor[: step.rows] for name, tensor in cache.items()}
            shallow = engines.of("unet_shallow", request.variant)
            read = {t.name for t in shallow.spec.inputs}
            others = conditions | {n: t[: step.rows] for n, t in residuals.items()}
            given = {**inputs, **{n: t for n, t in others.items() if n in read}, **kept}
            predicted = call(shallow, engines.arch, given)["noise"]
        guided = predicted[:1]
        if step.is_guided:
            guided = predicted[1:] + request.guidance * (predicted[:1] - predicted[1:])
        fresh = noise.next()[None] if row[schedulers.COLUMNS.index("d")] else None
        x, h = schedulers.step(x, guided, h, fresh, schedulers.columns(coefficients))
    return x[0]


def covers(window: Window | ImageWindow, number: int, request: Request) -> bool:
    steps = len(request.plan)
    return window.begin <= number / steps and (number + 1) / steps <= window.end


def images_of(request: Request, number: int, rows: int) -> dict[str, Tensor]:
    """The keys and values of the image prompts in a deep step, without padding."""
    images = request.conditioning.images
    shown = [each.text for each in images if covers(each.window, number, request)]
    if not shown:
        return {}
    most = max(text[0].shape[1] for text in shown)
    missing = [most - text[0].shape[1] for text in shown]
    given = {}
    for index, tensors in enumerate(zip(*shown, strict=True)):
        padded = [pad(t, (0, 0, 0, n)) for t, n in zip(tensors, missing, strict=True)]
        name = f"image_text_{('keys', 'values')[index % 2]}_{index // 2}"
        given[name] = torch.stack(padded, 1)[:rows]
    masks = [torch.cat([torch.zeros(most - n), torch.full((n,), -torch.inf)]) for n in missing]
    return {**given, "image_mask": torch.stack(masks)[None].repeat(rows, 1, 1)}


def residuals_of(
    engines: Engines, request: Request, inputs: dict[str, Tensor], number: int
) -> dict[str, Tensor]:
    """The sum of the ControlNets' residuals in a deep step."""
    sums: dict[str, Tensor] = {}
    for each in request.controls:
        strength = float(covers(each.window, number, request))
        rows = len(inputs["sample"])
        prompt, deep = (each.net.engines[n] for n in ("control_prompt", "control_deep"))
        given = {t.name: getattr(request.conditioning, t.name, None) for t in prompt.spec.inputs}
        own = {n: each.hints[n][None] if t is None else t[:rows] for n, t in given.items()}
        hints = {n: own[n].expand(rows, *own[n].shape[1:]).contiguous() for n in each.hints}
        ready = call(prompt, engines.arch, own | hints)
        strengths = strength * torch.tensor(each.strengths)[:rows]
        made = call(deep, engines.arch, {**inputs, **ready, "strengths": strengths})
        sums = {name: sums.get(name, 0) + tensor for name, tensor in made.items()}
    return sums
