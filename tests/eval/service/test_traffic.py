"""Open loops do not wait for answers, and closed loops do."""

from __future__ import annotations

import asyncio
import time

from eval.service.traffic import closed_loop, open_loop


async def send(number: int, due_s: float) -> tuple[int, float]:
    await asyncio.sleep(0.2)
    return number, due_s


def test_open_loops_do_not_wait_for_answers_and_closed_loops_do() -> None:
    began_s = time.perf_counter()
    answers = asyncio.run(open_loop(send, 200.0, 0.1))
    assert [number for number, _ in answers] == list(range(len(answers))) and len(answers) > 5
    assert all(began_s <= due_s <= began_s + 5 for _, due_s in answers)
    assert len(asyncio.run(closed_loop(send, 3, 0.1))) == 3
