"""OpenAI's edits of images as data: a form of files and fields, or JSON with data URLs.

It reads what a client sent, and decodes no image.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from sdxl.params import PARAMETERS
from serve.errors import Problem, invalid
from serve.front.openai_images import ImageRequest

PATH = "/v1/images/edits"
FORM, JSON = "multipart/form-data", "application/json"
MAX_IMAGES = 16
"""as OpenAI allows; here an edit is of one"""
MAX_FIELDS = 100
IMAGES = ("image", "image[]")
LISTS = {each.client_name: each for each in PARAMETERS.values() if each.kind is tuple}
DATA_URL = re.compile(r"data:image/[\w.+-]{1,40};base64,", re.ASCII)
NEEDED_URL = "needed a data URL: data:image/png;base64,…"
M = TypeVar("M", bound=BaseModel)
Reference = dict[Literal["image_url", "file_id"], str]


class EditRequest(ImageRequest):
    """What an edit may ask, besides its images."""

    kind: ClassVar[str] = "image_edit"

    input_fidelity: Annotated[
        Literal["low", "high"] | None, Field(description="accepted; see strength")
    ] = None


class EditBody(EditRequest):
    """The same as JSON."""

    images: Annotated[
        list[Reference], Field(min_length=1, max_length=MAX_IMAGES, description=NEEDED_URL)
    ]
    mask: Reference | None = None


@dataclass(frozen=True)
class EditAsked:
    """A request as it was sent, its files still closed."""

    request: EditRequest
    image: bytes
    mask: bytes | None


async def read_edit(request: Request) -> EditAsked:
    """Raises Problem, or pydantic's errors as FastAPI tells them."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == FORM:
        return await read_form(request)
    if kind == JSON:
        return of_json(await request.body())
    raise Problem(415, f"needed {FORM} or {JSON}", None, "unsupported_media_type")


def of_json(text: bytes) -> EditAsked:
    body = checked(EditBody, text)
    image = bytes_of(only_one(body.images), "images")
    mask = None if body.mask is None else bytes_of(body.mask, "mask")
    fields = {name: getattr(body, name) for name in body.model_fields_set - {"images", "mask"}}
    return EditAsked(EditRequest.model_construct(**fields), image, mask)


async def read_form(request: Request) -> EditAsked:
    try:
        form = await request.form(max_files=2 * MAX_IMAGES, max_fields=MAX_FIELDS)
    except HTTPException as error:
        raise invalid(None, f"The form cannot be read: {error.detail}", "invalid_form") from None
    try:
        return await of_form(form)
    finally:
        await form.close()


async def of_form(form: FormData) -> EditAsked:
    images = [each for name in IMAGES for each in form.getlist(name)]
    image = await content(only_one(images), "image")
    masks = form.getlist("mask")
    if len(masks) > 1:
        raise invalid("mask", f"mask: {len(masks)} are not allowed; at most one")
    mask = await content(masks[0], "mask") if masks else None
    fields = fields_of(form)
    request = checked(EditRequest, fields)
    for name, text in fields.items():
        # pydantic reads 1_0 as 10, as Python does.
        if isinstance(getattr(request, name), int | float) and "_" in text:
            raise invalid(name, f"{name}: needed a number, got {text[:40]!r}")
    return EditAsked(request, image, mask)


def only_one(images: Sequence[Any]) -> Any:
    if len(images) > MAX_IMAGES:
        raise invalid("image", f"image: {len(images)} images are not allowed; at most {MAX_IMAGES}")
    if not images:
        raise invalid("image", "image: needed a file", "missing_required_parameter")
    if len(images) > 1:
        message = f"image: {len(images)} images are not possible; this model edits one at a time"
        raise invalid("image", message)
    return images[0]


async def content(file: UploadFile | str, field: str) -> bytes:
    if isinstance(file, str):
        raise invalid(field, f"{field}: needed a file, not text")
    return await file.read()


def fields_of(form: FormData) -> dict[str, Any]:
    """The form's texts; pydantic reads numbers in them, but for lists of them."""
    found: dict[str, Any] = {}
    for name, values in by_name(form).items():
        if name in LISTS:
            found[name] = numbers(name, values)
        elif len(values) > 1:
            raise invalid(name[:100], f"{name[:100]}: is there twice")
        else:
            (found[name],) = values
    return found


def by_name(form: FormData) -> dict[str, list[Any]]:
    """OpenAI's clients send a list as `name[]`, once for each entry."""
    found: dict[str, list[Any]] = {}
    for name, value in form.multi_items():
        if name in (*IMAGES, "mask"):
            continue
        list_name = name.removesuffix("[]")
        found.setdefault(list_name if list_name in LISTS else name, []).append(value)
    return found


def numbers(name: str, values: Sequence[Any]) -> list[int | float]:
    try:
        return list(LISTS[name].parse(",".join(values).replace("_", "?")))
    except (TypeError, ValueError):
        raise invalid(name, f"{name}: needed numbers with commas between") from None


def checked(model: type[M], values: bytes | Mapping[str, Any]) -> M:
    """A form's fields are texts, and numbers are read in them; JSON's have types of their own."""
    try:
        if isinstance(values, bytes):
            return model.model_validate_json(values)
        return model.model_validate(values, strict=False)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_input=False)) from None


def bytes_of(reference: Reference, field: str) -> bytes:
    url = reference.get("image_url")
    if url is None or len(reference) > 1:
        raise invalid(field, f"{field}: needed image_url alone; there are no files here")
    head = DATA_URL.match(url)
    if head is None:
        raise invalid(field, f"{field}: {url[:40]!r} is not fetched; {NEEDED_URL}")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise invalid(field, f"{field}: broken base64; {NEEDED_URL}") from None


def documented() -> dict[str, Any]:
    """The body for /openapi.json; FastAPI does not see it, as it is read here."""
    form = EditRequest.model_json_schema()
    file = {"type": "string", "format": "binary"}
    form["properties"] |= {"image": file, "mask": file}
    form["required"] = ["image", *form["required"]]
    content = {FORM: {"schema": form}, JSON: {"schema": EditBody.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}
