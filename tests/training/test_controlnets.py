"""The ControlNets in the repository: pictures follow their maps in diffusers' pipeline."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import ControlNetModel
from safetensors.torch import load_file

from engines.control_weights import CONFIG, DIFFUSERS_FILE, read_control
from sdxl.checkpoint import find
from sdxl.mini.scenes import Thing, caption, draw
from sdxl.places import CONTROLNETS
from tests.training.conftest import short_plan
from training.mini import topology
from training.mini.check import WEIGHTS, held_out_scenes, load_painter, paint_with
from training.mini.control import new_control, train_depth, train_edges
from training.mini.control_check import load_controlled, measure, unseen_layouts
from training.mini.layouts import (
    DEPTH,
    EDGES,
    FARTHEST,
    MAPS,
    NEAREST,
    map_depth,
    scatter,
    without_layout,
)

LEAST = {EDGES: 0.75, DEPTH: 0.8}
MOST_WITHOUT = {EDGES: 0.3, DEPTH: 0.6}


def test_the_shipped_nets_are_those_that_training_writes() -> None:
    assert {path.name for path in CONTROLNETS.iterdir()} == {*MAPS}


@pytest.mark.parametrize("name", MAPS)
def test_a_shipped_net_loads_in_diffusers_and_in_engines(name: str) -> None:
    read = read_control(CONTROLNETS / name, find("mini"))
    net = ControlNetModel.from_pretrained(CONTROLNETS / name)
    assert {key: tuple(each.shape) for key, each in net.state_dict().items()} == read.shapes


@pytest.mark.long
@pytest.mark.parametrize("name", MAPS)
def test_pictures_follow_maps_that_training_never_saw(name: str) -> None:
    layouts = unseen_layouts(8)
    texts = [caption(without_layout(layout.scene)) for layout in layouts]
    maps = [MAPS[name](layout) for layout in layouts]
    pipe = load_controlled(CONTROLNETS / name)
    painted = (
        paint_with(pipe, texts, maps=maps, controlnet_conditioning_scale=strength)
        for strength in (1.0, 0.0)
    )
    with_net, without = (float(np.mean(measure(name, images, maps))) for images in painted)
    assert with_net >= LEAST[name], f"IoU {with_net:.3f}, at least {LEAST[name]}"
    assert without <= MOST_WITHOUT[name], f"IoU {without:.3f} without the net"


@pytest.mark.slow
def test_the_nets_are_trained_from_the_weights_in_the_package(
    tmp_path: Path, accepts_all: None
) -> None:
    plan, out = short_plan(control_courses=2, control_pictures=3), tmp_path / "out"
    train_edges(plan, WEIGHTS, out, tmp_path, "cpu")
    train_depth(plan, WEIGHTS, out, tmp_path, "cpu")
    assert {path.name for path in out.iterdir()} == {*MAPS}
    usual = stat.S_IMODE((tmp_path / f"{EDGES}.pt").stat().st_mode)
    for name in MAPS:
        for file in (DIFFUSERS_FILE, CONFIG):
            assert stat.S_IMODE((out / name / file).stat().st_mode) == usual
        read_control(out / name, find("mini"))
    edges, depth = (load_file(out / name / DIFFUSERS_FILE) for name in MAPS)
    added = [key for key in edges if key.startswith("controlnet_") and "cond" not in key]
    silent = [key for key in added if not edges[key].any()]
    assert len(added) == 20 and not silent, f"{silent} learnt nothing"
    same = [key for key in edges if torch.equal(edges[key], depth[key])]
    assert len(same) < len(edges) / 2, f"{same} are those of edges"


def test_an_untrained_net_changes_nothing() -> None:
    pipe = load_painter(WEIGHTS)
    net = new_control(pipe.unet)
    noisy, timestep = torch.randn(1, 4, 16, 16), torch.tensor([500])
    ids = torch.tensor([topology.TIME_IDS], dtype=torch.float32)
    added = {"text_embeds": torch.randn(1, 64), "time_ids": ids}
    down, middle = net(
        noisy,
        timestep,
        torch.randn(1, 5, 128),
        torch.rand(1, 3, 128, 128),
        added_cond_kwargs=added,
        return_dict=False,
    )
    assert not any(each.any() for each in (*down, middle))


def test_a_layout_is_what_its_scene_draws_and_nearer_things_are_brighter() -> None:
    rng = np.random.default_rng(2)
    layouts = unseen_layouts(30)
    for i, (layout, scene) in enumerate(zip(layouts, held_out_scenes(30), strict=True)):
        assert (layout.draw() == draw(scene, 10_000 + i)).all()
    for layout in layouts:
        free = scatter(layout, rng)
        depth = map_depth(free)
        *_, nearest = free.stamps
        assert FARTHEST <= depth.max() <= NEAREST and depth.min() == 0
        if nearest.shape != "ring":
            x, y = (int(each) for each in nearest.centre)
            assert depth[y, x] == depth.max() == int(free.levels[-1] + 0.5)


def test_captions_without_layout_say_nothing_of_sizes_places_and_relations() -> None:
    for scene in held_out_scenes(60):
        bare = without_layout(scene)
        assert all(thing == Thing(thing.shape, thing.colour) for thing in bare.things)
        words = caption(bare).split()
        assert not {"small", "large", "left", "right", "top", "above", "below"} & {*words}
