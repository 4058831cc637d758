"""Makes orders from a request: checks the limits of service and model, and fills in defaults."""

from __future__ import annotations

from dataclasses import replace

from sdxl.flight import Priority
from sdxl.params import PARAMETERS, GenerationParams, InvalidParams, Sizes, of_rest
from serve.errors import invalid, of_params
from serve.front.openai_images import ImageRequest, longest_side
from serve.models import check_model
from serve.orders import ImageOrder, ModelCard
from serve.settings import ServeSettings

OF_OTHER_MEDIA = {"frame_count": "gif", "frame_duration_ms": "gif", "svg": "svg"}


def orders_of(
    request: ImageRequest,
    card: ModelCard,
    settings: ServeSettings,
    first_seed: int,
    deadline_s: float,
) -> list[ImageOrder]:
    """Return an order for each picture. Raises Problem if service or model refuse the request."""
    check_limits(request, card, settings)
    seed = first_seed if request.seed is None else request.seed
    count = request.n or 1
    is_streamed = bool(request.stream)
    try:
        params = params_of(request, card, settings).without_tags()
        params.check_result(served_sizes(card, settings))
        each = [params.picture(i, seed) for i in range(count)]
    except InvalidParams as error:
        raise of_params(error) from None
    previews = preview_steps(params.all_steps, request.partial_images or 0) if is_streamed else ()
    return [
        ImageOrder(
            one,
            request.format,
            request.output_compression,
            deadline_s,
            previews,
            is_streamed and bool(request.progress),
            Priority.BATCH if request.priority == "batch" else Priority.INTERACTIVE,
            model=settings.model_name if request.model else "",
            is_lenient=request.moderation == "low",
        )
        for one in each
    ]


def check_plain(request: ImageRequest) -> None:
    """Refuse fields that only an edit can have."""
    for each in PARAMETERS.values():
        if each.is_for_edits and getattr(request, each.client_name) is not None:
            name = each.client_name
            raise invalid(name, f"{name} needs an image; use /v1/images/edits")


def check_limits(request: ImageRequest, card: ModelCard, settings: ServeSettings) -> None:
    check_model(request.model, card.id, settings)
    check_other_media(request)
    if request.background == "transparent":
        raise invalid("background", "background must be 'opaque', got 'transparent'")
    if request.stream and request.response_format == "url":
        raise invalid("response_format", "response_format: a stream carries b64_json alone")
    steps = settings.max_steps
    for field, most in (("n", settings.max_n), ("steps", steps), ("upscale_steps", steps)):
        value = getattr(request, field)
        if value is not None and value > most:
            raise invalid(field, f"{field} must be at most {most}, got {value}")
    for field in ("prompt", "negative_prompt"):
        check_characters(field, getattr(request, field) or "", settings)


def check_characters(field: str, text: str, settings: ServeSettings) -> None:
    length, most = len(text), settings.max_prompt_chars
    if length > most:
        raise invalid(field, f"{field} must have at most {most} characters, got {length}")


def check_other_media(request: ImageRequest) -> None:
    """Refuse fields of OpenAI's newer models that have no meaning for a still picture."""
    for field, format in OF_OTHER_MEDIA.items():
        if getattr(request, field) is not None:
            needed = f"is for output_format {format}, here are png, jpeg, webp; leave it out"
            raise invalid(field, f"{field}: {needed}")
    if request.complexity is not None:
        raise invalid("complexity", "complexity is not supported; use `quality`")


def params_of(
    request: ImageRequest,
    card: ModelCard,
    settings: ServeSettings,
    edit_strength: float | None = None,
) -> GenerationParams:
    """Return the request's parameters. `edit_strength`: the default strength of an edit."""
    width, height = size_of(request.size, card, settings)
    # A field of the request overrides the preset.
    preset = card.presets[request.effective_quality]
    asked = {each.name: getattr(request, each.client_name) for each in of_rest()}
    if preset.steps > settings.max_steps and asked["steps"] is None:
        asked["steps"] = settings.max_steps
    values = preset.beside(asked, is_named=request.names_quality, edit_strength=edit_strength)
    return GenerationParams.from_dict({"width": width, "height": height, **values})


def served_sizes(card: ModelCard, settings: ServeSettings) -> Sizes:
    return replace(card.sizes, maximum=longest_side(card, settings))


def size_of(asked: str | None, card: ModelCard, settings: ServeSettings) -> tuple[int, int]:
    sizes = card.sizes
    if asked is None or asked == "auto":
        return sizes.default, sizes.default
    most = longest_side(card, settings)
    width, height = (int(side) for side in asked.split("x"))
    if settings.nearest_size:
        return nearest_size(width, height, sizes, most)
    for side in (width, height):
        if not sizes.minimum <= side <= most or side % sizes.multiple:
            raise invalid(
                "size",
                "size must be 'auto', or WIDTHxHEIGHT with each side a multiple of "
                f"{sizes.multiple} from {sizes.minimum} to {most}, got {asked!r}",
            )
    return width, height


def nearest_size(width: int, height: int, sizes: Sizes, most: int) -> tuple[int, int]:
    """Return the nearest allowed size with about the same shape; the answer's `size` reports it."""
    scale = min(1.0, most / max(width, height))
    scale = max(scale, sizes.minimum / min(width, height))

    def fitted(side: int) -> int:
        multiple = round(side * scale / sizes.multiple) * sizes.multiple
        largest = most // sizes.multiple * sizes.multiple
        return min(max(multiple, sizes.minimum), largest)

    return fitted(width), fitted(height)


def preview_steps(steps: int, count: int) -> tuple[int, ...]:
    """Return `count` steps, evenly spaced between the first and the last; fewer for few steps."""
    spaced = {round(steps * (i + 1) / (count + 1)) for i in range(count)}
    return tuple(sorted(step for step in spaced if 0 < step < steps))
