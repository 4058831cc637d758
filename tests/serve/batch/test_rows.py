"""Ids, seeds, names and shards depend on the input alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sdxl.attachments import Lora
from sdxl.checkpoint import find
from sdxl.params import InvalidParams, Sizes
from serve.batch.intake import Intake
from serve.batch.ledger import FILE
from serve.batch.reading import COLUMNS, Record, count, find_inputs, read
from serve.batch.rows import MAX_ID, MAX_NAME, BatchRow, content_id, seed_of, stem_of
from serve.errors import Problem
from serve.front.image_orders import orders_of
from serve.front.openai_images import ImageRequest
from serve.orders import ModelCard
from serve.settings import ServeSettings
from tests.serve.batch.drawers import SIZES, jsonl, parquet

IDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


def intake(n: int = 1, sizes: Sizes | None = SIZES, **defaults: Any) -> Intake:
    return Intake(defaults, n, "sdxl-mini", sizes, "png", find("mini").presets)


def line(id_: str, **body: Any) -> dict[str, Any]:
    """Return a line of OpenAI's Batch API."""
    body = {"prompt": "a", **body}
    return {"custom_id": id_, "method": "POST", "url": "/v1/images/generations", "body": body}


def rows_of(path: Path, **options: Any) -> list[BatchRow]:
    return list(intake(**options).rows(read([path])))


@given(IDS, IDS)
def test_ids_and_file_names_are_one_to_one(a: str, b: str) -> None:
    assert (stem_of(a) == stem_of(b)) == (a == b)


@given(IDS)
@example("..")
@example("../../etc/passwd")
@example("a\0b")
def test_a_file_name_stays_in_its_folder(id_: str) -> None:
    stem = stem_of(id_)
    assert FILE.fullmatch(f"images/000000/{stem}.png")
    assert "/" not in stem and not stem.startswith(".") and stem.isascii() and "\0" not in stem


def test_the_second_picture_of_a_and_a_request_named_a_1_have_names_of_their_own() -> None:
    checked = replace(intake(), format=None, are_ids_checked=True)
    for order in ([("a", 2), ("a-1", 1)], [("a-1", 1), ("a", 2)]):
        rows = list(checked.rows(Record(id_, line(id_, n=n)) for id_, n in order))
        assert [row.error for row in rows] == [None] * 3
        assert len({row.id for row in rows}) == 3


def test_long_ids_have_file_names_of_their_own(tmp_path: Path) -> None:
    ends = [f"{i:03d}" for i in range(3)]
    ids = [c * (MAX_ID - 3) + end for c in "x.аあ😀" for end in ends]
    ids += ["x" * length for length in range(MAX_NAME - 1, MAX_NAME + 26)]
    stems = {stem_of(id_) for id_ in ids} | {stem_of(stem_of("x" * MAX_ID))}
    assert len(stems) == len(ids) + 1
    for stem in stems:
        (tmp_path / f"{stem}.webp").touch()
        assert FILE.fullmatch(f"images/000000/{stem}.webp")
    assert stem_of("x" * MAX_NAME) == "x" * MAX_NAME


@pytest.mark.parametrize("n", [1, 2])
def test_an_id_has_1_to_512_characters(n: int, tmp_path: Path) -> None:
    source = jsonl(tmp_path, [{"prompt": "a", "id": "あ" * k} for k in (0, 1, MAX_ID, MAX_ID + 1)])
    assert [row.error is None for row in rows_of(source, n=n)] == [*(False, *[True] * 2 * n, False)]


def test_ids_and_seeds_follow_from_content_alone(tmp_path: Path) -> None:
    contents = [{"prompt": "a"}, {"prompt": "b", "steps": 4}, {"prompt": "c", "width": 64}]
    first = rows_of(jsonl(tmp_path, contents))
    again = rows_of(jsonl(tmp_path, contents[::-1], "reversed.jsonl"), steps=9)
    named = {row.id: row.params.seed for row in first if row.params}
    assert named == {row.id: row.params.seed for row in again if row.params}
    assert len(named) == 3 and first[0].id == content_id({"prompt": "a"})
    assert named[first[0].id] == seed_of(first[0].id)


def test_n_pictures_a_row_have_ids_and_seeds_of_their_own(tmp_path: Path) -> None:
    source = jsonl(tmp_path, [{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "y", "seed": 7}])
    rows = rows_of(source, n=2)
    assert [row.id for row in rows] == ["x-0", "x-1", "y-0", "y-1"]
    seeds = [row.params.seed for row in rows if row.params]
    assert seeds == [seed_of("x-0"), seed_of("x-1"), 7, 8]
    assert [row.ordinal for row in rows] == [0, 1, 2, 3]


def test_a_rows_values_override_the_flags(tmp_path: Path) -> None:
    source = jsonl(tmp_path, [{"prompt": "a", "steps": 4, "guidance_scale": 2}, {"prompt": "b"}])
    first, second = rows_of(source, steps=9, guidance=3.0)
    assert first.params and (first.params.steps, first.params.guidance) == (4, 2)
    assert second.params and (second.params.steps, second.params.guidance) == (9, 3.0)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"prompt": None}, "prompt must be text"),
        ({"prompt": 5}, "prompt must be text, got 5"),
        ({"width": 100}, "width must be a multiple of 8 from 64 to 512, got 100"),
        ({"height": 4096}, "height must be a multiple of 8 from 64 to 512, got 4096"),
        ({"stesp": 4}, "stesp must be one of prompt, "),
        ({"steps": "4"}, "steps must be a whole number from 1 to 1000, got '4'"),
        ({"seed": 1.5}, "seed must be a whole number from 0 to 9223372036854775807, got 1.5"),
        ({"id": ["x"]}, "id must be text"),
        ({"id": "x" * 600}, "id must have 1 to 512 characters"),
        ({"id": "\ud800"}, "id must be valid Unicode"),
        ({"prompt": "\ud800"}, "prompt must be valid Unicode"),
        ({"guidance_scale": 10**400}, "guidance must be a number from 0 to 100, got 1000"),
        ({"seed": 10**400}, "seed must be a whole number from 0 to"),
        ({"\ud800": 1}, "\\ud800 must"),
        (["a"], "must be a JSON object"),
    ],
)
def test_a_bad_row_keeps_its_place_and_names_its_error(
    values: Any, error: str, tmp_path: Path
) -> None:
    row = {"prompt": "a"} | values if isinstance(values, dict) else values
    first, bad, last = rows_of(jsonl(tmp_path, [{"prompt": "a"}, row, {"prompt": "b"}]))
    assert first.error is None and last.error is None and (bad.ordinal, last.ordinal) == (1, 2)
    assert bad.error is not None and bad.error.startswith(error), bad.error
    assert bad.error.encode()
    assert bad.line == "rows.jsonl, line 2" and bad.params is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*COLUMNS, "custom_id", "method", "url", "body"]) | st.text(max_size=3)


@given(st.dictionaries(NAMES, JSON | st.binary(), max_size=4))
def test_a_row_of_any_json_stops_no_other(values: dict[str, Any]) -> None:
    good = [Record(f"line {n}", {"prompt": f"good row {n}"}) for n in (1, 3)]
    rows = list(intake().rows([good[0], Record("line 2", values), good[1]]))
    assert rows[0].error is None and rows[-1].error is None
    assert all((row.error is None) != (row.params is None) for row in rows)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("x.txt", b"\xff\n\na\n", "prompt must be UTF-8 text"),
        ("x.jsonl", b'[1\n\n{"prompt": "a"}\n', "must be a JSON object"),
        ("x.jsonl", b'\xed\xa0\x80\n\n{"prompt": "a"}\n', "must be a JSON object"),
        ("x.csv", b"prompt\ncaf\xe9\na\n", "prompt must be valid Unicode"),
    ],
)
def test_an_unreadable_line_is_one_bad_row(
    name: str, content: bytes, error: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    bad, good = rows_of(tmp_path / name)
    assert bad.error and bad.error.startswith(error)
    assert good.params and good.line == f"{name}, line 3"


@pytest.mark.parametrize("n", [1, 3])
def test_equal_rows_are_pictures_of_their_own(n: int, tmp_path: Path) -> None:
    contents = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}, {"prompt": "a"}]
    rows = rows_of(jsonl(tmp_path, contents), n=n)
    assert [row.error for row in rows] == [None] * 4 * n
    assert [row.ordinal for row in rows] == list(range(4 * n))
    assert len({stem_of(row.id) for row in rows}) == 4 * n
    assert len({row.params.seed for row in rows if row.params}) == 4 * n
    first = content_id({"prompt": "a"})
    assert rows[0].id == (first if n == 1 else f"{first}-0"), "the first keeps its name"
    assert rows[-1].id.startswith(f"{first}-row{3 * n}")


def test_a_repeated_id_is_an_error_that_names_its_first_row(tmp_path: Path) -> None:
    contents = [{"prompt": c, "id": "i"} for c in "ab"]
    first, second = rows_of(jsonl(tmp_path, contents))
    assert first.error is None and second.error is not None
    assert "already used in rows.jsonl, line 1" in second.error


def test_every_file_format_gives_the_same_rows(tmp_path: Path) -> None:
    first = {"prompt": "a, b", "negative_prompt": None, "seed": 7, "guidance_scale": 2.5, "id": "x"}
    rows = [
        {**first, "loras": ["a:0.8", "b:1:0.5"]},
        {"prompt": "c", "negative_prompt": "d", "id": "y"},
        {"prompt": "", "id": "z"},
        {"prompt": " ", "id": "0"},
    ]
    (tmp_path / "rows.csv").write_text(
        "\ufeffprompt,negative_prompt,seed,guidance_scale,id,loras\n"
        '"a, b",,7,2.5,x,"a:0.8,b:1:0.5"\nc,d,,,y,\n,,,,z,\n ,,,,0,\n'
    )
    paths = (jsonl(tmp_path, rows), tmp_path / "rows.csv", parquet(tmp_path, rows))
    facts = [[(row.id, row.params, row.error) for row in rows_of(path)] for path in paths]
    assert all(error is None for _, _, error in facts[0])
    params = facts[0][0][1]
    assert params and params.loras == (Lora("a", 0.8), Lora("b", 1.0, 0.5))
    assert facts[0] == facts[1] == facts[2]


def test_tags_are_taken_out_of_a_row_s_prompt(tmp_path: Path) -> None:
    contents = [
        {"prompt": "c <lora:a:0.5>", "loras": [{"name": "b"}]},
        line("one", prompt="c<lora:a:0.5>", loras=["b"]),
        {"prompt": "<lora:>"},
    ]
    first, second, wrong = rows_of(jsonl(tmp_path, contents))
    for row in (first, second):
        assert row.params and row.params.prompt == "c"
        assert row.params.loras == (Lora("b"), Lora("a", 0.5))
    assert wrong.error and wrong.error.startswith("prompt must name a LoRA")


def test_a_row_for_a_service_has_both_sides_or_none() -> None:
    sides: list[dict[str, int]] = [{}, {"width": 64, "height": 96}, {"width": 64}, {"height": 96}]
    rows = intake(sizes=None).rows(Record(str(s), {"prompt": "a", **s}) for s in sides)
    assert [row.error for row in rows] == [
        None,
        None,
        "height must be set beside width: a service needs both",
        "width must be set beside height: a service needs both",
    ]


def test_few_steps_are_all_deep(tmp_path: Path) -> None:
    contents = [
        {"prompt": "a", "steps": 4},
        {"prompt": "b"},
        {"prompt": "c", "steps": 4, "cache_interval": 3},
        line("one", steps=4),
        line("two"),
        line("three", steps=4, quality="low"),
        line("four", quality="high"),
    ]
    source = jsonl(tmp_path, contents)
    intervals, given = (
        [row.params.interval for row in rows_of(source, **flags) if row.params]
        for flags in ({}, {"cache_interval": 5})
    )
    assert intervals == [1, 2, 3, 1, 2, 2, 1] and given[:3] == [5, 5, 3]


def test_a_line_of_openais_batch_api_is_read_as_the_service_reads_it(tmp_path: Path) -> None:
    errors = [
        (line("three", model="another"), "'another'"),
        (line("four", size="100x100"), "got '100x100'"),
        (line("five", colour="red"), "colour is not a field here; leave it out"),
        ({**line("six"), "url": "/v1/chat/completions"}, "url must be POST"),
        (line("seven", expand_prompt=True), "expand_prompt cannot be set"),
        (line("eight", output_compression=50), "output_compression cannot be set"),
        (line("nine", stream=True), "stream cannot be set"),
    ]
    good = [line("one", size="64x128", quality="low", seed=3, model="sdxl-mini"), line("two", n=2)]
    one, two, _, *wrong = rows_of(jsonl(tmp_path, [*good, *(row for row, _ in errors)]))
    assert one.params and (one.id, one.params.width, one.params.height) == ("one", 64, 128)
    assert (one.params.steps, one.params.cache_interval, one.params.seed) == (20, 2, 3)
    assert two.id == "two-0" and two.params and two.params.width == 128
    for row, (_, words) in zip(wrong, errors, strict=True):
        assert row.error and words in row.error, row.error


@pytest.mark.parametrize("max_side", [0, 256, 64])
def test_a_line_of_the_batch_api_has_the_services_limits(max_side: int) -> None:
    card, limits = ModelCard("sdxl-mini", SIZES), ServeSettings(max_side=max_side)
    sized = {"prompt": "a", "size": "192x192"}
    bodies: list[dict[str, Any]] = [
        {"prompt": "a"},
        *({**sized, "upscale": times} for times in (1, 2, 4)),
    ]
    for body in bodies:
        (row,) = replace(intake(), limits=limits).rows([Record("line 1", line("x", **body))])
        try:
            orders_of(ImageRequest(**body), card, limits, 0, 1.0)
            refusal = None
        except Problem as problem:
            refusal = problem.message
        assert row.error == refusal, body


def test_a_txt_line_is_a_prompt_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xef\xbb\xbfa ring\r\n\n  a star  \n")
    rows = rows_of(path)
    assert [row.params and row.params.prompt for row in rows] == ["a ring", "a star"]
    assert count([path]) == 2 and rows[1].line == "x.txt, line 3"


def test_shards_are_cut_by_place_alone(tmp_path: Path) -> None:
    source = jsonl(tmp_path, [{"prompt": str(i)} if i != 3 else {} for i in range(10)])
    shards = list(intake().shards(read([source]), 4))
    assert [piece.shard for piece in shards] == [0, 1, 2]
    ordinals = [[row.ordinal for row in piece.rows] for piece in shards]
    assert ordinals == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_pattern_stands_for_its_files_sorted_by_name(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text("x\n")
    assert [p.name for p in find_inputs([str(tmp_path / "*.txt")])] == ["a.txt", "b.txt"]
    with pytest.raises(InvalidParams, match="must be an existing file"):
        find_inputs([str(tmp_path / "*.csv")])


@pytest.mark.parametrize(
    ("name", "content", "needed"),
    [
        ("x.csv", "prompt,stesp\na,4\n", "be one of the columns prompt, "),
        ("x.csv", "steps\n4\n", "have a column named prompt"),
        ("x.parquet", "no", "be a Parquet file"),
        ("x.tsv", "", "be a file that ends in .txt, "),
    ],
)
def test_a_file_of_a_wrong_form_is_refused(
    name: str, content: str, needed: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidParams, match=f"input must {needed}"):
        list(read(find_inputs([str(tmp_path / name)])))
