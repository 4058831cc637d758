"""Pictures in requests: their data URLs, the thread that decodes them, and the files of ControlNets
and image prompts by SHA-256, checked before the request is queued. It knows no HTTP server.
"""

from __future__ import annotations

import asyncio
import base64
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, TypeVar

from sdxl.control_maps import Pictures, add_map, check_pictures, previewed
from sdxl.controls import Control
from sdxl.parameter import MAX_ATTACHMENTS, Parameter
from sdxl.params import PICTURED, InvalidParams
from sdxl.picture_files import file_of
from serve.errors import invalid, late, of_params
from serve.front.image_orders import check_limits, params_of
from serve.front.openai_images import ImageRequest
from serve.orders import ModelCard
from serve.settings import ServeSettings

DATA_URL = re.compile(r"data:image/[\w.+-]{1,40};base64,", re.ASCII)
DATA_URL_ONLY = "must be a data URL (data:image/png;base64,…); other URLs are not fetched"
FILES: Mapping[str, str] = {"controls": "control_image", "image_prompts": "prompt_image"}
"""By list: the form's field for files of the list's entries without an image, in order."""
T = TypeVar("T")
R = TypeVar("R", bound=ImageRequest)


class DecodingThread:
    """Decodes one picture after another, as a large one takes 100 MB. A cancelled request holds the
    thread until its decode finishes; a lock around asyncio's threads would be released before."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "pictures")

    async def run(self, decode: Callable[[], T], until_s: float = math.inf) -> T:
        """Return the result, or raise Problem at this monotonic time: others' pictures go first."""
        left_s = None if math.isinf(until_s) else until_s - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                return await asyncio.get_running_loop().run_in_executor(self._thread, decode)
        except TimeoutError:
            raise late() from None


def file_in(url: str, param: str, name: str = "") -> bytes:
    """Return the file of a data URL, or raise Problem. `name`: its name in the error."""
    name, head = name or param, DATA_URL.match(url)
    if head is None:
        raise invalid(param, f"{name} {DATA_URL_ONLY}, got {url[:40]!r}")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except ValueError:
        raise invalid(param, f"{name} must be valid base64 after data:image/png;base64,") from None


def has_pictures(asked: ImageRequest) -> bool:
    return any(getattr(asked, name) for name in PICTURED)


def read_attached(asked: R, card: ModelCard, settings: ServeSettings) -> tuple[R, Pictures]:
    """Check a request without a source, and return what `take_pictures` returns. Raises Problem."""
    check_limits(asked, card, settings)
    try:
        asked, maps = take_pictures(asked)
    except InvalidParams as error:
        raise of_params(error) from None
    check(asked, maps, card, settings)
    return asked, maps


def check(asked: ImageRequest, maps: Pictures, card: ModelCard, settings: ServeSettings) -> None:
    """Raise Problem if a picture of a request without a source is missing or invalid."""
    try:
        check_pictures(params_of(asked, card, settings), maps)
    except InvalidParams as error:
        raise of_params(error) from None


def preview_of(data: bytes, **fields: Any) -> bytes:
    """Return a PNG of the map that a Control with these fields makes of a picture. Raises
    Problem."""
    try:
        control = Control("map", **fields)
        control.check(Control.FIELD)
        return file_of(previewed(data, control), compress_level=1)
    except InvalidParams as error:
        raise of_params(error) from None


def take_pictures(
    asked: R, files: Mapping[str, Sequence[bytes]] | None = None
) -> tuple[R, Pictures]:
    """Return the request with pictures replaced by their SHA-256, and the pictures by SHA-256.
    `files`: by list, the files of entries without an image. Raises Problem or InvalidParams."""
    lists, pictures = dict[str, Any](), dict[str, bytes]()
    for name, each in PICTURED.items():
        sent = (files or {}).get(name, ())
        lists[name] = _entries(each, getattr(asked, name) or [], sent, pictures) or None
    return asked.model_copy(update=lists), pictures


def _entries(
    each: Parameter, given: Sequence[Any], files: Sequence[bytes], pictures: dict[str, bytes]
) -> list[dict[str, Any]]:
    if len(given) > MAX_ATTACHMENTS:
        raise InvalidParams(each.name, len(given), f"must have at most {MAX_ATTACHMENTS} entries")
    entries, left = [], list(files)
    for entry in (_fields(each, one) for one in given):
        data = _picture_of(each.name, entry, left)
        if data is not None:
            entry["image"] = add_map(data, pictures)
        entries.append(entry)
    if left:
        field, count = FILES[each.name], len(files) - len(left)
        needed = f"must be {count} files, one for each entry of {each.name} without an image"
        raise invalid(field, f"{field} {needed}, got {len(files)}")
    return entries


def _picture_of(field: str, entry: Mapping[str, Any], left: list[bytes]) -> bytes | None:
    """Return an entry's file: its `image`, or the next of `left`; None without a file."""
    image = entry.get("image", "")
    if image == "":
        return left.pop(0) if left else None
    # Another type is refused with the other fields.
    name = f"{field} with {str(entry.get('name'))[:60]!r}: image"
    return file_in(image, field, name) if isinstance(image, str) else None


def _fields(each: Parameter, entry: Any) -> dict[str, Any]:
    """Return the fields that an entry sets, unchecked. Raises InvalidParams."""
    fields = entry
    if not isinstance(entry, dict):
        (read,) = each.read_list([entry])
        fields = asdict(read)
    return {name: value for name, value in fields.items() if value is not None}
