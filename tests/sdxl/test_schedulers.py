"""Every scheduler's table, step by step, against diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from sdxl.params import InvalidParams
from sdxl.scheduler_names import SCHEDULERS
from sdxl.schedulers import (
    COLUMNS,
    SchedulerConfig,
    Table,
    UnsupportedScheduler,
    columns,
    step,
    table,
)
from tests.sdxl.their_schedulers import CONFIG, their_scheduler

# diffusers passes tensors to numpy in a way that numpy 2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

USUAL = SchedulerConfig.from_dict(CONFIG)
SHAPE = (1, 4, 8, 8)
TOLERANCE = 1e-5
DISTILLED = ("lcm", "tcd")
SPACINGS = ("leading", "trailing", "linspace")
PREDICTIONS = ("epsilon", "v_prediction")
STEPS = (1, 2, 4, 14, 15, 20, 50)


def column(made: Table, name: str) -> np.ndarray:
    return made.rows[:, COLUMNS.index(name)]


def coefficients(made: Table, index: int) -> torch.Tensor:
    return torch.from_numpy(made.rows[index : index + 1]).float()


def assert_close(found: torch.Tensor, needed: torch.Tensor, x: torch.Tensor, what: str) -> None:
    """The tolerance is a share of the largest value: diffusers subtracts from x in float32."""
    difference = (found - needed).abs().max().item()
    allowed = TOLERANCE * max(needed.abs().max().item(), x.abs().max().item())
    assert difference <= allowed, f"{what}: off by {difference:.2e}, allowed {allowed:.2e}"


def exactness(name: str) -> float:
    """Return the tolerance for timesteps, which diffusers computes in float32 for given levels."""
    return 1e-4 if name == "euler_ays" else 0.0


def compare(name: str, steps: int, values: Mapping[str, Any], at: int | None = None) -> None:
    """Give both schedulers the same x at every step and compare their results. `at`: an edit's
    first step, which starts from its latents with noise."""
    theirs = their_scheduler(name, values)
    theirs.set_timesteps(steps)
    if not name.startswith("ddim"):  # else it starts one late where the first two are equal
        theirs.set_begin_index(at or 0)
    made = table(name, steps, SchedulerConfig.from_dict(values)).begun(at or 0)
    timesteps = theirs.timesteps[at or 0 :]
    assert made.rows.shape == (len(timesteps), len(COLUMNS))
    np.testing.assert_allclose(column(made, "timestep"), timesteps.numpy(), rtol=exactness(name))
    assert made.start == pytest.approx(float(theirs.init_noise_sigma), rel=1e-6)
    draw = torch.Generator().manual_seed(steps)
    noise, their_noise = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    x = torch.randn(SHAPE, generator=draw) * made.start
    if at is not None:
        latents, drawn = (torch.randn(SHAPE, generator=draw) for _ in range(2))
        x = theirs.add_noise(latents, drawn, timesteps[:1])
        assert_close(made.noised(latents, drawn), x, x, f"{name}, {steps} steps, from {at}")
    h = torch.full(SHAPE, float("nan"))
    for index, timestep in enumerate(timesteps):
        row = coefficients(made, index)
        where = f"{name}, {steps} steps, step {index}"
        scaled = theirs.scale_model_input(x, timestep)
        assert_close(row[0, COLUMNS.index("s")] * x, scaled, scaled, f"{where}: model input")
        eps = torch.randn(SHAPE, generator=draw)
        z = torch.randn(SHAPE, generator=noise) if row[0, COLUMNS.index("d")] else None
        # The scheduler draws noise also in steps that need none, such as the last.
        extra = {"generator": their_noise} if row[0, COLUMNS.index("d")] else {}
        result = theirs.step(eps, timestep, x, **extra)
        moved, h = step(x, eps, h, z, columns(row))
        assert_close(moved, result.prev_sample, x, where)
        estimate = result.get("pred_original_sample")
        if estimate is None and hasattr(theirs, "model_outputs"):  # DPM++ keeps it to itself
            estimate = theirs.model_outputs[-1]
        if estimate is not None:
            assert_close(h, estimate, x, f"{where}: estimate")
        x = result.prev_sample
        if at is not None and index + 1 < len(timesteps):
            noisy = theirs.add_noise(latents, drawn, timesteps[index + 1 : index + 2])
            assert_close(made.noised(latents, drawn, index + 1), noisy, noisy, f"{where}: level")


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_step_equals_diffusers(name: str, prediction: str, spacing: str) -> None:
    """A run begins at the first step, or at a later step as in edits, with that step's noise."""
    values = {**CONFIG, "prediction_type": prediction, "timestep_spacing": spacing}
    for steps in STEPS:
        compare(name, steps, values)
    for steps, at in [(20, 0), (20, 1), (20, 10), (20, 19), (4, 2), (10, 2)]:
        compare(name, steps, values, at)


@pytest.mark.parametrize(
    "changes",
    [
        {"final_sigmas_type": "sigma_min"},
        {"set_alpha_to_one": True, "steps_offset": 0},
        {"beta_schedule": "linear"},
        {"beta_schedule": "squaredcos_cap_v2"},
        {"trained_betas": np.linspace(0.001, 0.02, 1000).tolist()},
        {"use_karras_sigmas": True},
        {"original_inference_steps": 100, "timestep_scaling": 4.0},
        {
            "rescale_betas_zero_snr": True,
            "prediction_type": "v_prediction",
            "timestep_spacing": "trailing",
        },
    ],
    ids=lambda changes: ",".join(changes),
)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_configuration_equals_diffusers(name: str, changes: dict[str, Any]) -> None:
    for steps in (3, 20):
        compare(name, steps, {**CONFIG, **changes})


@pytest.mark.parametrize("name", SCHEDULERS)
def test_missing_config_entries_take_each_class_own_default(name: str) -> None:
    values = {"_class_name": f"{name.upper()}Scheduler"} if name in DISTILLED else {}
    compare(name, 7, {"clip_sample": False, **values})


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_timesteps_equal_diffusers_for_every_number_of_steps(name: str, spacing: str) -> None:
    values = {**CONFIG, "timestep_spacing": spacing}
    config, theirs = SchedulerConfig.from_dict(values), their_scheduler(name, values)
    for steps in (*range(1, 61), 100, 250, 333, 500, 998):
        if name in DISTILLED and steps > config.original_inference_steps:
            break
        theirs.set_timesteps(steps)
        timesteps = column(table(name, steps, config), "timestep")
        expected, what = theirs.timesteps.numpy()[:steps], f"{name}, {steps} steps"
        np.testing.assert_allclose(timesteps, expected, rtol=exactness(name), err_msg=what)


@pytest.mark.parametrize("name", ["euler", "euler_karras", "euler_a", "ddim", "dpmpp_2m_karras"])
def test_the_longest_run_equals_diffusers(name: str) -> None:
    compare(name, 999, CONFIG)


def test_repeated_timesteps_stay_finite() -> None:
    """diffusers divides zero by zero if two timesteps share a noise level (DPM++, 999 steps)."""
    made = table("dpmpp_2m", 999, USUAL)
    repeated = made.rows[0]
    assert np.isfinite(made.rows).all()
    assert repeated[COLUMNS.index("a")] == pytest.approx(1) and made.rows[1, 4] == 0


def test_a_thousand_steps_work_if_the_schedule_has_a_thousand() -> None:
    for name in set(SCHEDULERS) - {"dpmpp_2m", "dpmpp_2m_sde", *DISTILLED}:
        assert table(name, 1000, USUAL).rows.shape == (1000, len(COLUMNS))
    with pytest.raises(
        InvalidParams, match=r"steps must be at most 999 with this scheduler, got 1000"
    ):
        table("dpmpp_2m", 1000, USUAL)


def test_trailing_timesteps_never_pass_the_end() -> None:
    """Because of arange's rounding diffusers makes a 62nd of 61 steps, at timestep -1."""
    made = table("ddim", 61, SchedulerConfig.from_dict({**CONFIG, "timestep_spacing": "trailing"}))
    assert len(made.rows) == 61 and column(made, "timestep").min() >= 0


def test_a_mixed_batch_equals_its_rows_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = [coefficients(table(name, 20, USUAL), i) for i, name in enumerate(SCHEDULERS)]
    shape = (len(rows), *SHAPE[1:])
    x, eps, h, z = (torch.randn(shape, generator=draw) for _ in range(4))
    together = step(x, eps, h, z, columns(torch.cat(rows)))
    for i, row in enumerate(rows):
        alone = step(x[i : i + 1], eps[i : i + 1], h[i : i + 1], z[i : i + 1], columns(row))
        for found, needed in zip(together, alone, strict=True):
            assert torch.equal(found[i : i + 1], needed), [*SCHEDULERS][i]


def test_stale_buffers_do_not_reach_a_new_row() -> None:
    x, eps = torch.randn(SHAPE), torch.randn(SHAPE)
    stale = torch.full(SHAPE, float("inf"))
    row = coefficients(table("dpmpp_2m", 20, USUAL), 0)
    needed = step(x, eps, torch.zeros(SHAPE), None, columns(row))
    found = step(x, eps, stale, stale, columns(row))
    unread = step(x, eps, None, None, columns(row))
    for of in (found, unread):
        assert torch.equal(of[0], needed[0]) and torch.equal(of[1], needed[1])


def test_half_precision_output_is_stepped_in_float32() -> None:
    row = coefficients(table("euler", 20, USUAL), 3)
    x, eps, h = torch.randn(SHAPE), torch.randn(SHAPE).half(), torch.zeros(SHAPE)
    moved, _ = step(x, eps, h, None, columns(row))
    assert moved.dtype == torch.float32
    assert torch.equal(moved, step(x, eps.float(), h, None, columns(row))[0])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clip_sample", True),
        ("thresholding", True),
        ("prediction_type", "sample"),
        ("timestep_spacing", "loglinear"),
        ("beta_schedule", "sigmoid"),
        ("use_exponential_sigmas", True),
        ("use_beta_sigmas", True),
        ("use_lu_lambdas", True),
        ("use_flow_sigmas", True),
        ("interpolation_type", "log_linear"),
        ("timestep_type", "continuous"),
        ("sigma_max", 80.0),
        ("lambda_min_clipped", -5.1),
        ("trained_betas", [0.1, 0.2]),
        ("_class_name", "EDMEulerScheduler"),
        *(("num_train_timesteps", value) for value in (0, -1, 10**12, "x", 1.5, True)),
        *(("beta_start", value) for value in (-1, 2, "x", [0.1])),
        *(("trained_betas", value) for value in ([], 5, ["x"], [0.1])),
        *(("steps_offset", 10**12), ("prediction_type", [[]])),
    ],
)
def test_what_a_table_cannot_express_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnsupportedScheduler, match=f"{key}: .*expected"):
        SchedulerConfig.from_dict({**CONFIG, key: value})


def test_noise_prediction_from_pure_noise_is_refused() -> None:
    values = {**CONFIG, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    with pytest.raises(UnsupportedScheduler, match=r"ddim .* rescale_betas_zero_snr"):
        table("ddim", 20, SchedulerConfig.from_dict(values))


@pytest.mark.parametrize(
    ("field", "name", "steps"),
    [("scheduler", "x", 1), ("steps", "ddim", 1001), ("steps", "lcm", 51), ("steps", "tcd", 51)],
)
def test_requests_beyond_the_schedule_are_refused(field: str, name: str, steps: int) -> None:
    with pytest.raises(InvalidParams) as caught:
        table(name, steps, USUAL)
    assert caught.value.field == field
