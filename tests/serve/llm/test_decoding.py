"""Continuous batching: every generation equals the same generation alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from serve.llm.decoding import Decoding, Generation
from serve.llm.text_orders import Message, Sampling, TextOrder
from tests.serve.llm.texts import prompts

SHORT = ("circle", "two stars", "a red ring", "something blue on a white background", "cross")
GREEDY = Sampling(temperature=0.0)


def ids_of(text: str) -> list[int]:
    return prompts().ids(TextOrder((Message("user", text),)))


def decoding_of(model: Any, rows: int = 8) -> Decoding:
    return Decoding(model, rows, 512, [model.generation_config.eos_token_id])


def finish(decoding: Decoding, *submitted: Generation) -> None:
    for generation in submitted:
        decoding.submit(generation)
    while not decoding.is_idle:
        decoding.step()


def plain(model: Any, ids: list[int], count: int) -> list[int]:
    """Generate with transformers' own method."""
    found = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
    )
    made: list[int] = found[0].tolist()
    return made


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_greedy_decoding_equals_plain_generate_token_by_token(mini_llm: Any, rows: int) -> None:
    asked = [ids_of(text) for text in SHORT]
    decoding = decoding_of(mini_llm, rows)
    made = [Generation(list(ids), GREEDY, 24) for ids in asked]
    finish(decoding, *made)
    assert [g.ids for g in made] == [plain(mini_llm, ids, 24) for ids in asked]


def test_joining_and_leaving_at_any_step_changes_no_other_text(mini_llm: Any) -> None:
    asked = [ids_of(text) for text in SHORT] * 2
    decoding = decoding_of(mini_llm, 4)
    made = [Generation(list(ids), GREEDY, 5 + i) for i, ids in enumerate(asked)]
    for i, generation in enumerate(made):
        decoding.submit(generation)
        decoding.step()
        if i == 6:
            decoding.cancel(made[5])
    finish(decoding)
    for i, (generation, ids) in enumerate(zip(made, asked, strict=True)):
        if i != 5:
            assert generation.ids == plain(mini_llm, ids, 5 + i), i


def test_a_seed_gives_the_same_text_in_any_batch(mini_llm: Any) -> None:
    def run(seeds: list[int]) -> dict[int, list[int]]:
        made = [Generation(ids_of("circle"), Sampling(seed=seed), 24) for seed in seeds]
        finish(decoding_of(mini_llm), *made)
        return {g.sampling.seed: g.ids for g in made}

    alone, among = run([3]), run([1, 2, 3, 4, 5])
    assert among[3] == alone[3]
    assert len({tuple(ids) for ids in among.values()}) > 1


def test_cancelled_and_finished_requests_hold_no_cache(mini_llm: Any) -> None:
    decoding = decoding_of(mini_llm, 2)
    made = [Generation(ids_of(text), GREEDY, 3) for text in SHORT]
    for generation in made:
        decoding.submit(generation)
    decoding.step()
    assert decoding.kv_share == sum(g.kept for g in made[:2]) / (2 * 512) > 0
    decoding.cancel(made[0])
    decoding.cancel(made[4])
    assert [len(decoding.running), len(decoding.waiting)] == [1, 2]
    finish(decoding)
    assert decoding.kv_share == 0 and made[4].made == 0


def test_answers_of_one_token_keep_no_other_waiting(mini_llm: Any) -> None:
    decoding = decoding_of(mini_llm, 2)
    long = Generation(ids_of("circle"), GREEDY, 4)
    decoding.submit(long)
    for _ in range(8):
        decoding.submit(Generation(ids_of("cross"), GREEDY, 1))
        decoding.step()
    assert long.made == 4


def test_a_failed_step_drops_the_running_requests_and_serves_later_ones(mini_llm: Any) -> None:
    decoding = decoding_of(mini_llm, 2)
    model, decoding.model = decoding.model, None
    decoding.submit(Generation(ids_of("circle"), GREEDY, 3))
    with pytest.raises(TypeError):
        decoding.step()
    assert decoding.is_idle
    decoding.model = model
    after = Generation(ids_of("circle"), GREEDY, 3)
    finish(decoding, after)
    assert after.made == 3


def test_top_p_keeps_the_fewest_tokens_that_weigh_so_much() -> None:
    logits = torch.log(torch.tensor([0.1, 0.6, 0.3]))

    def drawn(top_p: float) -> set[int]:
        each = (Generation([], Sampling(top_p=top_p, seed=seed), 1) for seed in range(60))
        return {generation.draw(logits) for generation in each}

    assert (drawn(0.5), drawn(0.8), drawn(1.0)) == ({1}, {1, 2}, {0, 1, 2})


@pytest.mark.parametrize("sampling", [Sampling(temperature=1e-40), Sampling(top_p=1e-46)])
def test_sampling_without_remaining_tokens_is_greedy(mini_llm: Any, sampling: Sampling) -> None:
    edge, plain = (Generation(ids_of("circle"), each, 4) for each in (sampling, GREEDY))
    finish(decoding_of(mini_llm, 2), edge, plain)
    assert edge.ids == plain.ids


def test_a_low_temperature_takes_the_likeliest() -> None:
    logits = torch.tensor([1.0, 2.0, 1.5])
    cold = (Generation([], Sampling(temperature=0.01, seed=seed), 1) for seed in range(20))
    assert {generation.draw(logits) for generation in cold} == {1}
