"""Tiles fit their GPU, are measured while no request waits, and are stored."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engines.pytorch import eight_bit
from engines.pytorch.tiles import (
    KIB,
    TILES,
    USUAL,
    Tile,
    TileProblem,
    Tiles,
    driver_version,
    measuring,
    place_of,
    shipped_for,
)

PROBLEM = TileProblem("int8", 9, 640, 640, 2 * 64 * 64, has_residual=False)
H200, L40S = 227 * KIB, 99 * KIB


def nothing(tile: Tile) -> None:
    pass


def never(run: Callable[[], None]) -> float:
    raise AssertionError("measured while a service runs")


def quickest_is(best: Tile) -> tuple[Callable[[Tile], None], Callable[[Callable[[], None]], float]]:
    """A run that records its tile, and a clock on which the tile `best` is the fastest."""
    ran: list[Tile] = []

    def measure(run: Callable[[], None]) -> float:
        run()
        return 1.0 if ran[-1] == best else 2.0

    return ran.append, measure


def test_a_product_that_was_not_measured_gets_the_usual_tile_at_once() -> None:
    assert Tiles(H200).choose(PROBLEM, nothing, never) == USUAL


def test_the_fastest_tile_is_measured_during_the_warm_up_and_stored(tmp_path: Path) -> None:
    tiles = Tiles(H200, file=tmp_path / "tiles.json")
    with measuring(tiles):
        found = tiles.choose(PROBLEM, *quickest_is(TILES[1]))
    assert found == TILES[1]
    assert tiles.choose(PROBLEM, nothing, never) == TILES[1]
    assert Tiles(H200, file=tmp_path / "tiles.json").choose(PROBLEM, nothing, never) == TILES[1]


def test_every_tile_fits_the_gpu() -> None:
    for kind in ((False, False), (True, False), (False, True)):
        for shared_bytes in (H200, L40S):
            tiles = Tiles(shared_bytes).fitting(TileProblem("fp8", 1, 1, 1, 1, *kind))
            assert USUAL in tiles
            assert all(tile.shared_bytes <= shared_bytes for tile in tiles)
    assert len(Tiles(L40S).fitting(PROBLEM)) < len(Tiles(H200).fitting(PROBLEM))


def test_where_sums_come_out_of_tensor_memory_fp8_has_no_tile_that_spills() -> None:
    """tests/engines/test_kernels_compile.py finds the tiles that spill."""
    for kind in ((False, False), (True, False), (False, True)):
        for number, is_less in (("int8", False), ("float8_e4m3fn", not kind[0])):
            problem = TileProblem(number, 1, 640, 640, 4096, *kind)
            here, there = (Tiles(H200, has).fitting(problem) for has in (False, True))
            assert here[0] == there[0] == USUAL
            assert (len(there) < len(here)) == is_less, (number, kind)


def test_a_services_sizes_share_few_keys() -> None:
    """Even row counts to 32 at three resolutions. Each key costs a second of the warm-up."""
    sizes = [rows * side * side for rows in range(2, 33, 2) for side in (32, 64, 128)]
    keys = {TileProblem("int8", 9, 640, 640, count, False).key for count in sizes}
    assert len(keys) <= 4, keys


def test_each_kind_of_product_has_a_key_of_its_own() -> None:
    kinds = ((False, False), (True, False), (False, True))
    keys = {TileProblem("int8", 1, 640, 640, 4096, *kind).key for kind in kinds}
    assert len(keys) == len(kinds), keys


def test_a_measurement_holds_for_one_gpu_driver_and_version(tmp_path: Path) -> None:
    versions = ("NVIDIA H200", "driver 580.1", "torch 2.11", "triton 3.6 abc")
    places = {place_of(versions)}
    for index in range(len(versions)):
        other = tuple(f"{v}x" if i == index else v for i, v in enumerate(versions))
        places.add(place_of(other))
    assert len(places) == 1 + len(versions)
    file = tmp_path / "version"
    file.write_text("NVRM version: 580.1")
    assert driver_version(file) == "NVRM version: 580.1"


@pytest.mark.parametrize("text", ["", "[1]", '{"key": 3}', '{"key": [1, 2]}'])
def test_a_damaged_table_is_said_and_measured_anew(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tiles.json"
    file.write_text(text)
    with caplog.at_level(logging.WARNING):
        tiles = Tiles(H200, file=file)
    assert not tiles.chosen and "measured anew" in caplog.text


@pytest.mark.parametrize("place", ["a file/tiles.json", "a folder"])
def test_tiles_are_measured_even_if_they_cannot_be_stored(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "a folder").mkdir()
    file = tmp_path / place
    with caplog.at_level(logging.WARNING):
        tiles = Tiles(H200, file=file)
        with measuring(tiles):
            found = tiles.choose(PROBLEM, *quickest_is(TILES[1]))
    assert found == TILES[1] == tiles.choose(PROBLEM, nothing, never)
    assert "measured anew" in caplog.text


@pytest.mark.parametrize("is_refused", [False, True])
def test_pytorchs_fp8_product_is_tried_as_it_will_be_used(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that refuses tiny factors, or has no slow sum, must not lose for that."""

    def like_a_library(a: torch.Tensor, b: torch.Tensor, *_: object, **given: object) -> object:
        if is_refused or min(*a.shape, *b.shape) < 256 or not given["use_fast_accum"]:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16)

    monkeypatch.setattr(torch, "_scaled_mm", like_a_library)
    assert eight_bit.runs_scaled_mm(torch.device("cpu"), torch.float16) is not is_refused


def test_shipped_tiles_are_not_measured_again_and_fit_their_gpu() -> None:
    shipped = shipped_for("NVIDIA H200")
    assert shipped and not shipped_for("NVIDIA L40S")
    tiles = Tiles(227 * KIB, is_measuring=True, shipped=shipped)
    problem = TileProblem("float8_e4m3fn", 1, 5120, 1280, 16384, has_residual=True)
    assert problem.key in shipped
    assert tiles.choose(problem, nothing, never) == shipped[problem.key]
    assert {tile.m for tile in shipped.values()} <= {64, 128, 256}
    assert all(tile.shared_bytes <= 227 * KIB for tile in shipped.values())
