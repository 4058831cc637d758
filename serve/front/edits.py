"""`POST /v1/images/edits`: OpenAI's edits, as a form of files and fields or as JSON with data URLs.

The image and the mask are checked and resized; then the edit becomes an ordinary order.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from sdxl.control_maps import Pictures, check_pictures
from sdxl.params import PARAMETERS, InvalidParams, of_rest
from sdxl.source import GivenImage, SourceImage
from serve import errors
from serve.errors import Problem, invalid
from serve.front.image_orders import params_of, served_sizes
from serve.front.openai_images import NEEDED_UNICODE, ImageRequest, has_surrogate
from serve.front.sent_pictures import DATA_URL_ONLY, FILES, file_in, take_pictures
from serve.orders import ModelCard
from serve.settings import ServeSettings

EDITS_PATH = "/v1/images/edits"
FORM, JSON = "multipart/form-data", "application/json"
MAX_IMAGES = 16
"""OpenAI's limit; this service edits one."""
MAX_FIELDS = 100
MAX_PART = 2**30
"""The most bytes of a form's text; the body has a limit already."""
IMAGES = ("image", "image[]")
LISTS_OF_FILES = {name: list_ for list_, file in FILES.items() for name in (file, f"{file}[]")}
"""A form's fields for files, and the list of the request to which they belong."""
LISTS = {each.client_name: each for each in PARAMETERS.values() if each.is_list}
M = TypeVar("M", bound=BaseModel)
Reference = dict[Literal["image_url", "file_id"], str]
R = TypeVar("R", bound=ImageRequest)


class EditRequest(ImageRequest):
    """The fields of an edit, without its images."""

    kind: ClassVar[str] = "image_edit"

    input_fidelity: Annotated[
        Literal["low", "high"] | None, Field(description="accepted; see strength")
    ] = None


class EditBody(EditRequest):
    """The same as JSON."""

    images: Annotated[
        list[Reference], Field(min_length=1, max_length=MAX_IMAGES, description=DATA_URL_ONLY)
    ]
    mask: Reference | None = None


@dataclass(frozen=True)
class SentEdit:
    """A request as the client sent it, with undecoded files."""

    request: EditRequest
    image: bytes
    mask: bytes | None
    files: Mapping[str, Sequence[bytes]] = field(default_factory=dict)
    """separate picture files, by list"""


def read_images(
    sent: SentEdit, card: ModelCard, settings: ServeSettings
) -> tuple[EditRequest, SourceImage, Pictures]:
    try:
        asked, maps = take_pictures(sent.request, sent.files)
        given = GivenImage.read(sent.image, sent.mask)
        return *prepare_edit(asked, given, card, settings, maps), maps
    except InvalidParams as error:
        raise errors.of_params(error) from None


def prepare_edit(
    asked: R,
    given: GivenImage,
    card: ModelCard,
    settings: ServeSettings,
    maps: Pictures | None = None,
) -> tuple[R, SourceImage]:
    """Return the request with every open field filled, and the resized image. Raises InvalidParams
    for an invalid picture."""
    if asked.size in (None, "auto"):
        width, height = given.size(card.sizes, is_part=asked.mask_padding is not None)
        asked = asked.model_copy(update={"size": f"{width}x{height}"})
    params = params_of(asked, card, settings, given.edit_strength)
    params = given.sized(params, served_sizes(card, settings))
    fields = {each.client_name: None for each in of_rest()} | params.as_rest()
    source = given.source(params)
    check_pictures(params, maps or {}, source)
    return asked.model_copy(update=fields), source


def check_can_edit(card: ModelCard) -> None:
    if not card.can_edit:
        message = "This model's engines have no encoder for images; export and build them again."
        raise errors.Problem(501, message, None, "edits_unavailable")


async def read_edit(request: Request) -> SentEdit:
    """Raises Problem or RequestValidationError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == FORM:
        async with form_in(request, 3 * MAX_IMAGES, MAX_FIELDS) as form:
            return await of_form(form)
    if kind == JSON:
        return of_json(await request.body())
    raise Problem(415, f"Content-Type must be {FORM} or {JSON}", None, "unsupported_media_type")


def of_json(text: bytes) -> SentEdit:
    body = checked(EditBody, text)
    image = bytes_of(only_one(body.images), "images")
    mask = None if body.mask is None else bytes_of(body.mask, "mask")
    fields = {name: getattr(body, name) for name in body.model_fields_set - {"images", "mask"}}
    return SentEdit(EditRequest.model_construct(**fields), image, mask)


@asynccontextmanager
async def form_in(request: Request, max_files: int, max_fields: int) -> AsyncIterator[FormData]:
    """Read a form. Raises Problem for an unreadable form, or invalid Unicode."""
    reason = ""
    try:
        form = await request.form(
            max_files=max_files, max_fields=max_fields, max_part_size=MAX_PART
        )
    except HTTPException as error:
        reason = error.detail
    except UnicodeError:
        # The client named one of Python's codecs that cannot decode this text.
        reason = "its charset does not fit"
    if reason:
        raise invalid(None, f"The form cannot be read: {reason}", "invalid_form")
    try:
        for name, value in form.multi_items():
            text = value if isinstance(value, str) else value.filename or ""
            if has_surrogate(name + text):
                raise invalid(name[:100], f"{name[:100]}: {NEEDED_UNICODE}")
        yield form
    finally:
        await form.close()


async def of_form(form: FormData) -> SentEdit:
    images = [each for name in IMAGES for each in form.getlist(name)]
    image = await content(only_one(images), "image")
    masks = form.getlist("mask")
    if len(masks) > 1:
        raise invalid("mask", f"mask must be one file, got {len(masks)}")
    mask = await content(masks[0], "mask") if masks else None
    fields = EditRequest.with_our_names(fields_of(form))
    request = checked(EditRequest, fields)
    for name, text in fields.items():
        # pydantic reads 1_0 as 10, as Python does.
        if isinstance(getattr(request, name), int | float) and "_" in text:
            raise invalid(name, f"{name} must be a number, got {text[:40]!r}")
    files: dict[str, list[bytes]] = {}
    for name, list_ in LISTS_OF_FILES.items():
        sent = [await content(each, name.removesuffix("[]")) for each in form.getlist(name)]
        files.setdefault(list_, []).extend(sent)
    return SentEdit(request, image, mask, files)


def only_one(images: Sequence[Any]) -> Any:
    if len(images) > MAX_IMAGES:
        raise invalid("image", f"image must be at most {MAX_IMAGES} files, got {len(images)}")
    if not images:
        raise invalid("image", "image must be a file", "missing_required_parameter")
    if len(images) > 1:
        message = f"image: {len(images)} images are not possible; this model edits one at a time"
        raise invalid("image", message)
    return images[0]


async def content(file: UploadFile | str, field: str) -> bytes:
    if isinstance(file, str):
        raise invalid(field, f"{field} must be a file, not text")
    return await file.read()


def fields_of(form: FormData) -> dict[str, Any]:
    """Return the form's texts. Lists are parsed here, numbers by pydantic."""
    fields: dict[str, Any] = {}
    for name, values in by_name(form).items():
        if name in LISTS:
            is_numbers = LISTS[name].kind is tuple
            fields[name] = numbers(name, values) if is_numbers else attachments(name, values)
        elif len(values) > 1:
            raise invalid(name[:100], f"{name[:100]} is given twice")
        else:
            (fields[name],) = values
    return fields


def by_name(form: FormData) -> dict[str, list[Any]]:
    """Collect the values of each field; OpenAI's clients send each entry of a list as `name[]`."""
    fields: dict[str, list[Any]] = {}
    for name, value in form.multi_items():
        if name in (*IMAGES, *LISTS_OF_FILES, "mask"):
            continue
        list_name = name.removesuffix("[]")
        fields.setdefault(list_name if list_name in LISTS else name, []).append(value)
    return fields


def numbers(name: str, values: Sequence[Any]) -> list[int | float]:
    try:
        return list(LISTS[name].parse(",".join(values).replace("_", "?")))
    except (TypeError, ValueError):
        raise invalid(name, f"{name} must be numbers with commas between") from None


def attachments(name: str, values: Sequence[Any]) -> list[Any]:
    """Read entries in text form, separated by commas, or JSON of one entry or a list."""
    try:
        given = [json.loads(v) if v.startswith(("[", "{")) else v.split(",") for v in values]
    except (AttributeError, RecursionError, ValueError):
        needed = f"must be {LISTS[name].needed} with commas between, or JSON"
        raise invalid(name, f"{name} {needed}") from None
    return [each for one in given for each in (one if isinstance(one, list) else [one])]


def checked(model: type[M], values: bytes | Mapping[str, Any]) -> M:
    """Validate JSON, whose types must match, or a form's texts, which pydantic converts."""
    try:
        if isinstance(values, bytes):
            return model.model_validate_json(values)
        return model.model_validate(values, strict=False)
    except ValidationError as error:
        found = error.errors(include_input=False)
        found = [{**each, "loc": ("body", *each["loc"])} for each in found]
        raise RequestValidationError(found) from None


def bytes_of(reference: Reference, field: str) -> bytes:
    url = reference.get("image_url")
    if url is None or len(reference) > 1:
        raise invalid(field, f"{field} takes image_url only; files cannot be referenced here")
    return file_in(url, field)


def describe_edit_body() -> dict[str, Any]:
    """Describe the body for /openapi.json; FastAPI does not know it, since it is read here."""
    form = EditRequest.model_json_schema()
    file = {"type": "string", "format": "binary"}
    files = {key: {"type": "array", "items": file} for key in FILES.values()}
    form["properties"] |= {"image": file, "mask": file, **files}
    form["required"] = ["image", *form["required"]]
    content = {FORM: {"schema": form}, JSON: {"schema": EditBody.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}
