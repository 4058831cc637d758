"""OpenAI's Images API as data: requests and answers.

Fields that OpenAI's API lacks are at top level, as its SDK's `extra_body` sends them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from sdxl.parameter import Attachment, table_of
from sdxl.params import (
    BY_NAME,
    COUNT_ALIASES,
    PARAMETERS,
    InvalidParams,
    Parameter,
    of_rest,
    renamed,
)
from sdxl.presets import usual_interval
from sdxl.scheduler_names import SCHEDULERS
from sdxl.suggestions import did_you_mean
from serve.errors import invalid, of_params
from serve.orders import ModelCard
from serve.settings import MAX_N, ServeSettings

SIZE = r"^(auto|[1-9][0-9]{1,4}x[1-9][0-9]{1,4})$"
Quality = Literal["auto", "low", "medium", "high", "xhigh", "max", "standard", "hd"]
Precision = Literal["fp32", "fp16", "bf16", "int8", "fp8"]
Format = Literal["png", "jpeg", "webp"]
MEDIA: dict[Format, str] = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
JSON_TYPES: dict[type, Any] = {
    str: "string",
    int: "integer",
    float: "number",
    **dict.fromkeys((tuple, Attachment), "array"),
}
MODEL_ID = r"^[\w.+-]{1,64}$"
UNKNOWN_FIELD = "extra_forbidden"
SURROGATE = re.compile("[\ud800-\udfff]")
NEEDED_UNICODE = "must be valid Unicode, without lone surrogates"
SIDES = ("width", "height")
SAME_QUALITY = {"auto": "medium", "standard": "medium", "hd": "high"}


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    other_names: ClassVar[tuple[str, ...]] = ()
    """other programs' names of fields"""

    @model_validator(mode="wrap")
    @classmethod
    def _add_hints(cls, fields: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Put unknown fields first, each with the nearest known one."""
        try:
            return handler(cls.with_our_names(fields) if isinstance(fields, dict) else fields)
        except ValidationError as error:
            errors = sorted(error.errors(), key=lambda each: each["type"] != UNKNOWN_FIELD)
            if errors[0]["type"] != UNKNOWN_FIELD:
                raise
        raise ValidationError.from_exception_data(
            cls.__name__,
            [_with_hint(each, (*cls.model_fields, *cls.other_names)) for each in errors],
        )

    @classmethod
    def with_our_names(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields under our names."""
        return fields

    @field_validator("*")
    @classmethod
    def _is_unicode(cls, value: Any) -> Any:
        """Refuse lone surrogates, which JSON allows, but no tokenizer and no answer's encoding."""
        for text in value if isinstance(value, list) else (value,):
            if isinstance(text, str) and has_surrogate(text):
                raise PydanticCustomError("unicode", NEEDED_UNICODE)
        return value


def _with_hint(error: Any, known: Iterable[str]) -> InitErrorDetails:
    message, place = error["msg"], error["loc"]
    if error["type"] == UNKNOWN_FIELD and len(place) == 1:
        hint = did_you_mean(place[0], known) or "; leave it out"
        message = f"is not a field here{hint}"
    kind = PydanticCustomError(error["type"], "{message}", {"message": message})
    return InitErrorDetails(type=kind, loc=place, input=error["input"])


def has_surrogate(text: str) -> bool:
    return not text.isascii() and SURROGATE.search(text) is not None


def field_of(each: Parameter) -> Any:
    """Make an optional field of a picture's parameter."""
    kind = each.stored_kind
    if each.choices:
        kind = Annotated[Literal[each.choices], BeforeValidator(partial(_checked, each))]
    if each.kind in (int, float):
        kind = Annotated[kind, *bounds_of(each)]
    if each.kind is Attachment:
        kind = list[Annotated[Any, WithJsonSchema(describe_entry(each.item))]]
    return Annotated[kind | None, Field(description=each.help)], None


def checked_size(value: Any) -> Any:
    if isinstance(value, str) and not re.search(SIZE, value):
        needed = "must be auto or WIDTHxHEIGHT, such as 1024x1024"
        raise PydanticCustomError("size", needed)
    return value


def bounds_in_json(each: Parameter) -> dict[str, float]:
    bounds = {} if each.kind is str else {"minimum": each.low, "maximum": each.high}
    return {name: value for name, value in bounds.items() if math.isfinite(value)}


def bounds_of(each: Parameter) -> tuple[Any, ...]:
    """Return a number's bounds, whose errors have the words of the table instead of pydantic's."""
    bounds: dict[str, Any] = {"minimum": each.low, "maximum": each.high}
    return AfterValidator(partial(_checked, each)), Field(json_schema_extra=bounds)


def _checked(each: Parameter, value: Any) -> Any:
    value = each.chosen(value)
    try:
        each.check(value)
    except InvalidParams as error:
        message = error.message("", longest=100).strip()
        raise PydanticCustomError("parameter", "{message}", {"message": message}) from None
    return value


def describe_entry(item: type[Any]) -> dict[str, Any]:
    """Describe an entry of a list of attachments; `GenerationParams.from_dict` checks it."""
    properties = {
        name: {"type": JSON_TYPES[each.kind], "description": each.help, **bounds_in_json(each)}
        for name, each in table_of(item).items()
    }
    form = {"type": "object", "properties": properties, "required": ["name"]}
    text = {"type": "string", "description": item.form()}
    return {"anyOf": [text, {**form, "additionalProperties": False}]}


PictureFields: Any = create_model(
    "PictureFields",
    __base__=RequestModel,
    **{each.client_name: field_of(each) for each in of_rest()},
)
"""Every parameter of the table in sdxl/params.py; other fields of a request are below."""


class ImageRequest(PictureFields):
    kind: ClassVar[str] = "image_generation"
    """prefix of events' names"""
    other_names: ClassVar[tuple[str, ...]] = (*BY_NAME, *COUNT_ALIASES)

    prompt: Annotated[str, Field(description=PARAMETERS["prompt"].help)]
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    size: (
        Annotated[
            str,
            BeforeValidator(checked_size),
            Field(pattern=SIZE, description="`auto` or WIDTHxHEIGHT"),
        ]
        | None
    ) = None
    quality: Annotated[
        Quality | None, Field(description="a preset of steps and cache_interval")
    ] = None
    response_format: Literal["url", "b64_json"] | None = None
    output_format: Format | None = None
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    background: Literal["opaque", "auto", "transparent"] | None = None
    moderation: Annotated[
        Literal["low", "auto"] | None,
        Field(description="low: less strict, if the service has a safety checker"),
    ] = None
    style: Annotated[
        Literal["vivid", "natural"] | None, Field(description="accepted; has no effect")
    ] = None
    user: Annotated[str | None, Field(description="the old name of safety_identifier")] = None
    safety_identifier: Annotated[
        str | None, Field(max_length=512, description="returned in the answer; not stored")
    ] = None
    complexity: Annotated[
        Literal["low", "medium", "high"] | None, Field(description="refused; see quality")
    ] = None
    frame_count: Annotated[int | None, Field(description="refused; only for gif")] = None
    frame_duration_ms: Annotated[int | None, Field(description="refused; only for gif")] = None
    svg: Annotated[dict[str, Any] | None, Field(description="refused; only for svg")] = None
    stream: bool | None = None
    partial_images: Annotated[
        int | None, Field(ge=0, le=3, description="previews while streaming")
    ] = None
    # Fields that OpenAI's API lacks, besides PictureFields.
    deadline_s: Annotated[
        float | None,
        Field(gt=0, description="seconds; a request that cannot meet it is refused at once"),
    ] = None
    priority: Annotated[
        Literal["interactive", "batch"] | None,
        Field(description="batch: only while others leave room, without a deadline"),
    ] = None
    progress: Annotated[
        bool | None, Field(description="progress events while streaming: step, eta, queue")
    ] = None
    expand_prompt: Annotated[
        bool | None,
        Field(description="let the language model expand the prompt; see revised_prompt"),
    ] = None

    @classmethod
    def with_our_names(cls, fields: dict[str, Any]) -> dict[str, Any]:
        counts = [name for name in ("n", *COUNT_ALIASES) if name in fields]
        for name in counts[1:]:
            raise invalid(name, f"{name} must not be set beside {counts[0]}: it is the same")
        ours = {"n" if name in COUNT_ALIASES else name: value for name, value in fields.items()}
        try:
            ours = renamed(ours, lambda each: each.column)
        except InvalidParams as error:
            raise of_params(error) from None
        if sides := [str(ours.pop(side)) for side in SIDES if side in ours]:
            if len(sides) < len(SIDES) or "size" in ours:
                raise invalid("size", "size must be set alone, or width and height together")
            ours["size"] = "x".join(sides)
        return ours

    @property
    def format(self) -> Format:
        return self.output_format or "png"

    @property
    def identifier(self) -> str | None:
        return self.safety_identifier or self.user or None

    @property
    def effective_quality(self) -> str:
        asked = self.quality or "auto"
        return SAME_QUALITY.get(asked, asked)

    @property
    def names_quality(self) -> bool:
        return self.quality not in (None, "auto")


def longest_side(card: ModelCard, settings: ServeSettings) -> int:
    return min(card.sizes.maximum, settings.max_side or card.sizes.maximum)


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TokensDetails(Reply):
    text_tokens: int
    image_tokens: int = 0


class Usage(Reply):
    total_tokens: int
    input_tokens: int
    output_tokens: int = 0
    input_tokens_details: TokensDetails
    output_tokens_details: TokensDetails

    @classmethod
    def of(cls, prompt_tokens: int) -> Usage:
        return cls(
            total_tokens=prompt_tokens,
            input_tokens=prompt_tokens,
            input_tokens_details=TokensDetails(text_tokens=prompt_tokens),
            output_tokens_details=TokensDetails(text_tokens=0),
        )


class ImageData(Reply):
    b64_json: str | None = None
    url: str | None = None
    revised_prompt: str | None = None
    flagged: bool | None = None
    """true if the safety checker flagged the picture, which is blurred then"""
    seed: int
    timings: dict[str, float]
    deep_steps: int
    shallow_steps: int


class ImagesResponse(Reply):
    created: int
    data: list[ImageData]
    background: Literal["opaque"] = "opaque"
    output_format: Format
    size: str
    quality: str
    model: str
    usage: Usage
    safety_identifier: str | None = None


class ErrorDetail(Reply):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Reply):
    error: ErrorDetail


class FormControl(Reply):
    """A picture's parameter, for programs that build a form."""

    name: str
    """name in a picture's metadata"""
    field: str
    """name in a request"""
    label: str
    help: str
    placeholder: str
    type: Literal["string", "integer", "number", "array"]
    items: Literal["integer", "number", "object"] | None = None
    """type of an array's items"""
    fields: tuple[FormControl, ...] | None = None
    """fields of an array's objects"""
    default: str | int | float | None = None
    minimum: int | float | None = None
    maximum: int | float | None = None
    choices: tuple[str, ...] | None = None
    labels: tuple[str, ...] | None = None
    """other programs' names of the choices"""
    group: str | None = None
    """heading; none for the first parameters"""
    is_for_edits: bool | None = None
    """applies only to edits"""
    is_for_masks: bool | None = None
    """applies only to edits with a mask"""
    edit_defaults: tuple[int | float, ...] | None = None
    """defaults of an edit without a mask, and with one"""
    switch: str | None = None
    """label of a checkbox; the parameter is sent only if it is ticked"""
    switch_value: int | None = None
    """the parameter's value after a tick"""

    @classmethod
    def of(cls, each: Parameter) -> FormControl:
        is_attached = each.kind is Attachment
        fields = tuple(map(cls.of, table_of(each.item).values())) if is_attached else None
        return cls(
            name=each.name,
            field=each.client_name,
            label=each.label,
            help=each.help,
            placeholder=each.placeholder,
            type=JSON_TYPES[each.kind],
            items=JSON_TYPES.get(each.item, "object") if each.is_list else None,
            fields=fields,
            default=each.default,
            choices=each.choices or None,
            labels=tuple(each.labels[name] for name in each.choices) if each.labels else None,
            group=each.group or None,
            is_for_edits=each.is_for_edits or None,
            is_for_masks=each.is_for_masks or None,
            edit_defaults=each.edit_defaults or None,
            switch=each.switch or None,
            switch_value=each.switch_value,
            **bounds_in_json(each),
        )


class RunningEngines(Reply):
    """The engines that make the pictures, and why faster ones do not."""

    backend: str
    precision: str
    passed_over: dict[str, str] = {}

    @classmethod
    def of(cls, card: ModelCard) -> RunningEngines:
        engines = card.engines
        return cls(
            backend=str(engines.get("backend", "")),
            precision=str(engines.get("precision", "")),
            passed_over={k: str(v) for k, v in dict(engines.get("passed_over") or {}).items()},
        )


class ImageLimits(Reply):
    """Limits of a request for pictures, for programs that build a form."""

    default_side: int
    min_side: int
    max_side: int
    side_multiple: int
    sizes: tuple[str, ...]
    """usual sizes besides the default"""
    max_n: int
    max_steps: int
    max_prompt_chars: int
    can_edit: bool
    """whether the model serves /v1/images/edits"""
    at_once: int
    """best number of concurrent pictures over all replicas; 0 if unknown"""
    presets: dict[str, dict[str, Any]]
    """parameters of each `quality`, with steps and cache interval; auto is medium"""
    schedulers: tuple[str, ...] = tuple(SCHEDULERS)
    loras: tuple[str, ...]
    """names for a request's `loras` and the tags of its prompts"""
    embeddings: tuple[str, ...]
    """words of a prompt that stand for embeddings"""
    controlnets: tuple[str, ...]
    """names for a request's `controls`"""
    ip_adapters: tuple[str, ...]
    """names for a request's `image_prompts`"""
    refiner: str
    """the name for a request's `refiner`; empty without one"""
    parameters: tuple[FormControl, ...]

    @classmethod
    def of(cls, card: ModelCard, settings: ServeSettings) -> ImageLimits:
        return cls(
            default_side=card.sizes.default,
            min_side=card.sizes.minimum,
            max_side=longest_side(card, settings),
            side_multiple=card.sizes.multiple,
            sizes=card.sizes.usual(longest_side(card, settings)),
            max_n=settings.max_n,
            max_steps=settings.max_steps,
            max_prompt_chars=settings.max_prompt_chars,
            can_edit=card.can_edit,
            at_once=card.at_once,
            presets={name: preset.values() for name, preset in card.presets.items()},
            loras=card.loras,
            embeddings=tuple(card.embeddings),
            controlnets=tuple(card.controlnets),
            ip_adapters=tuple(card.ip_adapters),
            refiner=card.refiner,
            parameters=tuple(controls_of(card)),
        )


def controls_of(card: ModelCard) -> Iterator[FormControl]:
    """Yield the parameters, with the defaults of a request without steps and quality."""
    preset = card.presets[SAME_QUALITY["auto"]]
    usual: dict[str, dict[str, Any]] = {
        "steps": {"default": preset.steps},
        "cache_interval": {"placeholder": usual_interval(preset)},
    }
    unused = () if card.refiner else ("refiner", "refiner_switch_at")
    for name, each in PARAMETERS.items():
        if name not in unused:
            yield FormControl.of(each).model_copy(update=usual.get(name))


class Model(Reply):
    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "sdxl-deepcache"
    images: ImageLimits | None = None
    """for a model that makes pictures"""
    engines: RunningEngines | None = None


class ModelAsked(RequestModel):
    """A model to load."""

    model: Annotated[
        str, Field(description="a folder or a .safetensors file below `models_dir`", max_length=200)
    ]
    id: Annotated[
        str | None,
        Field(description="the name for requests; default: the file's name", pattern=MODEL_ID),
    ] = None
    precision: Annotated[Precision | None, Field(description="default: the backend's choice")] = (
        None
    )


class ModelDeleted(Reply):
    id: str
    object: Literal["model"] = "model"
    deleted: bool = True


class ModelList(Reply):
    object: Literal["list"] = "list"
    data: list[Model]
