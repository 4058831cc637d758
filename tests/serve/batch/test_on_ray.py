"""Workers as processes: a worker that dies or hangs is replaced, and only bad rows are given up."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

import psutil
import pytest

from serve.batch import command
from serve.batch.batch_spec import HAS_DEAD, BatchFailed
from serve.batch.running import run
from serve.orders import ImageOrder, Update
from tests.serve.batch.conftest import OnRay
from tests.serve.batch.drawers import (
    DIES,
    HANGS,
    RAISES,
    STOPS,
    Drawer,
    append_line,
    dead_letters,
    jsonl,
    lines_of,
    make,
    order_of,
    pictures,
    prompts,
)
from tests.waiting import wait_until


@pytest.mark.slow
def test_rows_that_raise_kill_or_hang_are_the_only_dead_letters(
    on_ray: OnRay, tmp_path: Path
) -> None:
    bad = {2: RAISES, 5: DIES, 8: HANGS}
    rows = [{"prompt": bad.get(i, f"a ring, {i}"), "id": f"i{i}"} for i in range(10)]
    source, out = jsonl(tmp_path, rows), tmp_path / "out"
    order = order_of(source, out, "--workers", "2", "--stall-s", "4")
    assert run(order, on_ray(Drawer)) == HAS_DEAD
    letters = {letter["id"]: letter["error"] for letter in dead_letters(out)}
    assert set(letters) == {"i2", "i5", "i8"}, letters
    assert "does not like this one" in letters["i2"] and "no progress for" in letters["i8"]
    assert len(pictures(out)) == 7 and command.main(["--verify", str(out)]) == 0


@pytest.mark.slow
def test_a_silent_worker_is_replaced_long_before_the_stall_time(
    on_ray: OnRay, tmp_path: Path
) -> None:
    rows = [{"prompt": STOPS if i == 3 else f"a ring, {i}", "id": f"i{i}"} for i in range(10)]
    source, out, log = jsonl(tmp_path, rows), tmp_path / "out", tmp_path / "log"
    order = order_of(source, out, "--workers", "2", "--stall-s", "1000")
    assert run(order, on_ray(partial(Drawer, str(log)))) == 0
    assert len(pictures(out)) == 10 and command.main(["--verify", str(out)]) == 0
    (stopped,) = lines_of(Path(f"{log}.stopped"))
    wait_until(lambda: not psutil.pid_exists(int(stopped)))


class Accompanied(Drawer):
    """Draws only when two workers have started, so that one cannot draw everything."""

    async def generate(self, order: ImageOrder) -> AsyncGenerator[Update]:
        started = Path(f"{self.log}.started")
        if str(os.getpid()) not in lines_of(started):
            append_line(str(started), str(os.getpid()))
        while len(set(lines_of(started))) < 2:
            await asyncio.sleep(0.05)
        async for update in super().generate(order):
            yield update


@pytest.mark.slow
def test_two_workers_share_a_job_and_make_the_same_pictures(on_ray: OnRay, tmp_path: Path) -> None:
    source, log = prompts(tmp_path, 64), tmp_path / "log"
    load = partial(Accompanied, str(log), 0.05)
    order = order_of(source, tmp_path / "two", "--workers", "2", "--shard-size", "8")
    assert run(order, on_ray(load)) == 0
    assert make(source, tmp_path / "one", "--shard-size", "8") == 0
    assert pictures(tmp_path / "two") == pictures(tmp_path / "one")
    assert len({line.split()[0] for line in lines_of(log)}) == 2, "one worker did everything"


@pytest.mark.slow
def test_workers_that_cannot_load_stop_the_job_with_their_reason(
    on_ray: OnRay, tmp_path: Path
) -> None:
    order = order_of(prompts(tmp_path, 2), tmp_path / "out")
    with pytest.raises(BatchFailed, match="no worker could be started: .*the engines are missing"):
        run(order, on_ray(refuse))


@pytest.mark.slow
def test_a_worker_whose_engines_broke_is_replaced_and_nothing_is_given_up(
    on_ray: OnRay, tmp_path: Path
) -> None:
    """This happens after a GPU's sticky error, which fails every later call."""
    source, log = prompts(tmp_path, 40), tmp_path / "broken"
    order = order_of(source, tmp_path / "out", "--shard-size", "8")
    assert run(order, on_ray(partial(Breaking, str(log)))) == 0
    assert len(pictures(tmp_path / "out")) == 40 and len(lines_of(log)) >= 40


class Breaking(Drawer):
    """The first of its processes breaks after ten pictures."""

    async def _misbehave(self, prompt: str) -> None:
        if self._is_broken():
            raise RuntimeError("an illegal memory access was encountered")

    def check(self) -> None:
        if self._is_broken():
            raise RuntimeError("the engines failed 3 times in a row")

    def _is_broken(self) -> bool:
        first = lines_of(Path(self.log))[:1]
        return self.made >= 10 and first == [f"{os.getpid()} {first[0].split()[1]}"]


def refuse() -> Drawer:
    raise RuntimeError("the engines are missing")
