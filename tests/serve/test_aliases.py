"""Other programs' names of parameters and schedulers, on every interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from sdxl.images import read_parameters
from sdxl.params import InvalidParams
from serve.batch.reading import read
from serve.batch_api.lines import pictures_of
from serve.render.command import build_parser, read_order
from serve.worker.worker import Worker
from tests.serve.batch.drawers import jsonl
from tests.serve.batch.test_rows import intake, line
from tests.serve.servers import post
from tests.serve.test_edits import EDIT, data_url, picture_in, png, send

THEIRS = {"num_inference_steps": 4, "cfg_scale": 2.5, "sampler_name": "DPM++ 2M Karras"}
OURS = {"steps": 4, "guidance": 2.5, "scheduler": "dpmpp_2m_karras"}


def of_ours(stored: dict[str, Any]) -> dict[str, Any]:
    return {name: stored[name] for name in OURS}


def test_render_takes_them_as_flags() -> None:
    flags = ["--num-inference-steps", "4", "--cfg_scale=2.5", "--sampler", "DPM++ 2M Karras"]
    line = ["a", *flags, "-n", "2", "-o", "pictures"]
    order = read_order(build_parser().parse_args(line))
    assert [of_ours(each.as_dict()) for each in order.requests] == [OURS, OURS]
    assert order.destination.folder == Path("pictures")
    diffusers = ["a", "--num_images_per_prompt", "3", "--guidance-scale", "2"]
    requests = read_order(build_parser().parse_args(diffusers)).requests
    assert [each.guidance for each in requests] == [2.0] * 3


def test_the_images_api_takes_them_as_fields(worker: Worker) -> None:
    sizes = {"width": 64, "height": 96, "num_images_per_prompt": 2}
    answer = post(worker, {"prompt": "a", **THEIRS, **sizes})
    assert of_ours(read_parameters(picture_in(answer, 1))) == OURS
    assert answer.json()["size"] == "64x96"


def test_an_edit_takes_them_in_a_form_and_in_json(worker: Worker) -> None:
    fields = {"prompt": "a", "denoising_strength": 0.5, **THEIRS}
    form = {name: str(value) for name, value in fields.items()}
    body = {**fields, "images": [{"image_url": data_url(png())}]}
    for answer in (send(worker, {"image": png()}, form), post(worker, body, EDIT)):
        stored = read_parameters(picture_in(answer))
        assert of_ours(stored) == OURS and stored["strength"] == 0.5


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "lines"])
def test_a_batch_takes_them_as_columns(kind: str, tmp_path: Path) -> None:
    row = {"prompt": "a", **THEIRS}
    path = tmp_path / f"rows.{kind}"
    match kind:
        case "csv":
            path.write_text(",".join(row) + "\n" + ",".join(map(str, row.values())) + "\n")
        case "parquet":
            parquet.write_table(arrow.Table.from_pylist([row]), path)
        case _:
            path = jsonl(tmp_path, [line("one", **row) if kind == "lines" else row])
    (found,) = intake().rows(read([path]))
    assert found.params and of_ours(found.params.as_dict()) == OURS, found.error


def test_a_parameter_under_two_names_is_refused(tmp_path: Path) -> None:
    twice = {"prompt": "a", "steps": 4, "num_inference_steps": 4}
    (found,) = intake().rows(read([jsonl(tmp_path, [twice])]))
    assert "must not be set beside steps" in str(found.error)
    path = tmp_path / "rows.csv"
    path.write_text(",".join(twice) + "\na,4,4\n")
    with pytest.raises(InvalidParams, match="must have each column once"):
        list(read([path]))


def test_a_batch_counts_pictures_by_either_name() -> None:
    assert pictures_of({"num_images_per_prompt": 3}) == pictures_of({"n": 3}) == 3
    assert pictures_of({"num_images_per_prompt": 3, "n": 3}) == 1, "it is refused"
