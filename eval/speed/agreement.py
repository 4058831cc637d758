"""The UNet calls of a picture, recorded to be repeated on other engines."""

from __future__ import annotations

from dataclasses import replace

from engines.parity.calls import EngineCall, listening
from sdxl.engine import Engines
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline

UNETS = ("unet_deep", "unet_shallow")


def recorded(pipeline: Pipeline, params: GenerationParams) -> list[EngineCall]:
    """Every UNet call of a picture, in order."""
    # A replayed recording would skip the listeners.
    plain = replace(pipeline.engines, run_recorded=Engines.run_recorded)
    engines, calls = listening(plain, *UNETS)
    (result,) = Pipeline(pipeline.checkpoint, engines).generate([params])
    if result.error:
        raise result.error
    return calls
