"""The maps of a request's ControlNets: each is a file by its SHA-256, checked before the request is
queued. It knows no HTTP server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from sdxl.control_maps import FIELD, Pictures, add_map, check_maps, previewed
from sdxl.controls import Control
from sdxl.parameter import MAX_ATTACHMENTS
from sdxl.params import InvalidParams
from sdxl.picture_files import file_of
from serve.errors import invalid, of_params
from serve.front.image_orders import check_limits, params_of
from serve.front.openai_images import ImageRequest
from serve.front.sent_pictures import file_in
from serve.orders import ModelCard
from serve.settings import ServeSettings

FILES = "control_image"
"""the field of a form for the files of entries without an image, in their order"""
R = TypeVar("R", bound=ImageRequest)


def read_maps(asked: R, card: ModelCard, settings: ServeSettings) -> tuple[R, Pictures]:
    """Return a request for a picture without a source as `taken` does. Raises Problem for a wrong
    request or map."""
    check_limits(asked, card, settings)
    try:
        asked, maps = taken(asked)
    except InvalidParams as error:
        raise of_params(error) from None
    check(asked, maps, card, settings)
    return asked, maps


def check(asked: ImageRequest, maps: Pictures, card: ModelCard, settings: ServeSettings) -> None:
    """Raises Problem for a map that is missing or wrong, in a request without a source."""
    try:
        check_maps(params_of(asked, card, settings), maps)
    except InvalidParams as error:
        raise of_params(error) from None


def preview_of(data: bytes, **fields: Any) -> bytes:
    """Return a PNG of the map that `fields` of a Control make of a picture. Raises Problem."""
    try:
        control = Control("map", **fields)
        control.check(FIELD)
        return file_of(previewed(data, control), compress_level=1)
    except InvalidParams as error:
        raise of_params(error) from None


def taken(asked: R, files: Sequence[bytes] = ()) -> tuple[R, Pictures]:
    """Return the request with the SHA-256 of each map as its `image`, and the maps by that. `files`
    are those of entries without an image. Raises Problem or InvalidParams."""
    given = asked.controls or []
    if len(given) > MAX_ATTACHMENTS:
        raise InvalidParams(FIELD, len(given), f"must have at most {MAX_ATTACHMENTS} entries")
    entries, maps, left = [], dict[str, bytes](), list(files)
    for entry in map(_fields, given):
        data = _map_of(entry, left)
        if data is not None:
            entry["image"] = add_map(data, maps)
        entries.append(entry)
    if left:
        needed = f"must be {len(files) - len(left)} files, one for each entry of {FIELD}"
        raise invalid(FILES, f"{FILES} {needed} without an image, got {len(files)}")
    return asked.model_copy(update={FIELD: entries or None}), maps


def _map_of(entry: Mapping[str, Any], left: list[bytes]) -> bytes | None:
    """Return the file of an entry: its own, or the next one. None: it has none."""
    image = entry.get("image", "")
    if image == "":
        return left.pop(0) if left else None
    # Another type is refused with the other fields.
    name = f"{FIELD} with {str(entry.get('name'))[:60]!r}: image"
    return file_in(image, FIELD, name) if isinstance(image, str) else None


def _fields(entry: Any) -> dict[str, Any]:
    """Return the fields that an entry sets, which may be wrong. Raises InvalidParams."""
    fields = entry if isinstance(entry, dict) else asdict(Control.read(entry, FIELD))
    return {name: value for name, value in fields.items() if value is not None}
