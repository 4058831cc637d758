"""The comparison with peers: turns, time limit, figures and report."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pytest
import torch

from eval.measuring.system_description import describe_system
from eval.measuring.timing import Spread, take_turns
from eval.speed import peers
from eval.speed.peers import measure_turns, write_report
from eval.speed.variants import CACHED, EAGER, BenchSetting, variant_name

OURS = ["torch:fp32"]
ONE, TWO = (variant_name(OURS[0], interval) for interval in (1, 2))
OPTIONS = argparse.Namespace(rounds=3, price_per_hour=2.0, ours=OURS)


def nothing() -> None: ...


def test_every_variant_has_a_turn_in_each_round() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = take_turns(runs, rounds=3, warmup=0)
    assert order == list("abcbcacab")
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_no_round_begins_after_the_time_limit() -> None:
    seconds = take_turns({"a": nothing}, rounds=1000, until_s=time.perf_counter() - 1)
    assert len(seconds["a"]) == 1, "the first round always runs"


def test_figures_follow_from_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = {EAGER: [4.0], CACHED: [2.0], ONE: [2.0], TWO: [1.0]}
    monkeypatch.setattr(peers, "take_turns", lambda *_, **__: fixed)
    result = measure_turns(dict.fromkeys(fixed, nothing), 4, OPTIONS, float("inf"))
    assert result["images/s"][TWO] == Spread(4.0, 4.0, 4.0)
    assert result["images per dollar"][EAGER].median == 3600 * 4 / 4.0 / 2.0
    assert result[f"times as fast as {EAGER}"][TWO].median == 4.0
    assert result["time at interval 2 over interval 1"][OURS[0]].median == 0.5


def test_the_report_has_json_and_a_table(tmp_path: Path) -> None:
    runs = dict.fromkeys([EAGER, CACHED, ONE, TWO], nothing)
    report = {
        "system": describe_system(),
        "model": "mini",
        "steps": 20,
        "passed_over": {"tensorrt:int8": "needs a GPU"},
        "peak_bytes": {EAGER: 2**30},
        "batches": {4: measure_turns(runs, 4, OPTIONS, float("inf"))},
    }
    write_report(report, tmp_path)
    stored = json.loads((tmp_path / "peers.json").read_text())
    assert stored["batches"]["4"]["images/s"][EAGER]["median"] > 0
    text = (tmp_path / "peers.txt").read_text()
    assert "passed over: tensorrt:int8: needs a GPU" in text
    assert all(name in text for name in stored["batches"]["4"]["images/s"])


def test_peak_memory_excludes_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process holds 50 GiB of the GPU's 100."""
    free = iter([50, 42])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free) * 2**30, 100 * 2**30))
    monkeypatch.setattr(peers, "load_one", lambda *_: lambda prompts: None)
    options = argparse.Namespace(memory_of=EAGER, ours=OURS, batch=[1])
    assert peers.peak_bytes(BenchSetting("mini", 64), options) == 8 * 2**30
