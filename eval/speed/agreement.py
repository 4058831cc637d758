"""How far another backend's UNet is from float32's, step by step, on the very same inputs.

A picture is painted once; every UNet call's inputs and answer are kept, and given to the other.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from engines.parity.calls import EngineCall, call_errors, listening
from sdxl.engine import Engines
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline

UNETS = ("unet_deep", "unet_shallow")
MOST_DB = 100.0
"""of equal pictures, whose PSNR has no bound"""


def recorded(pipeline: Pipeline, params: GenerationParams) -> list[EngineCall]:
    """Every UNet call of a picture, in order."""
    # A recording would be replayed, and nobody hear of the call.
    plain = replace(pipeline.engines, run_recorded=Engines.run_recorded)
    engines, calls = listening(plain, *UNETS)
    (result,) = Pipeline(pipeline.checkpoint, engines).generate([params])
    if result.error:
        raise result.error
    return calls


def errors_by_step(reference: Pipeline, engines: Engines, params: GenerationParams) -> list[float]:
    """Relative L2 of the predicted noise, a number for each step."""
    return call_errors(engines, recorded(reference, params))


def relative_l2(found: Tensor, expected: Tensor) -> float:
    expected = expected.to(found.device).double()
    return float(torch.linalg.vector_norm(found.double() - expected) / expected.norm())


def psnr_db(found: Tensor, expected: Tensor) -> float:
    """Of float pictures in -1..1."""
    error = float((found.double() - expected.double()).div(2).square().mean())
    return MOST_DB if error == 0 else min(-10 * math.log10(error), MOST_DB)
