"""`python -m tests.engines.interrupted_calls SEED COUNT`: pictures and single calls, each
interrupted once or twice at a random moment by a signal, like Ctrl-C. At the end a picture must be
the same as before. The program prints how many interrupts hit a call.
"""

from __future__ import annotations

import faulthandler
import random
import signal
import sys
from collections.abc import Callable

import torch

import engines
from sdxl.engine import allocate
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline

HUNG_S = 50
AXES = {"rows": 4, "tokens": 77, "latent_h": 16, "latent_w": 16, "chunks": 1, "batch": 2}
ASKED = [GenerationParams("a ring", steps=4, cache_interval=2, seed=i) for i in range(4)]


class Strikes:
    def __init__(self, seed: int) -> None:
        self.drawn = random.Random(seed)
        self.left = self.struck = 0
        signal.signal(signal.SIGALRM, self.strike)

    def strike(self, *_: object) -> None:
        self.left -= 1
        self.struck += 1
        if self.left > 0:
            signal.setitimer(signal.ITIMER_REAL, self.drawn.uniform(0.00001, 0.002))
        raise KeyboardInterrupt

    def during(self, call: Callable[[], object], longest_s: float) -> None:
        """At most two interrupts come: one at the end of the inner `try`, and one at the end of the
        outer. After the timer is cleared, no further one can come."""
        faulthandler.dump_traceback_later(HUNG_S, exit=True)
        try:
            try:
                try:
                    self.left = self.drawn.choice((1, 2))
                    signal.setitimer(signal.ITIMER_REAL, self.drawn.uniform(0.0001, longest_s))
                    call()
                finally:
                    # If the first interrupt comes here, no second one is sent.
                    self.left = 0
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                pass
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            pass


def written_after(pipeline: Pipeline, strikes: Strikes) -> None:
    """Make one call, and check that its outputs do not change after its end."""
    deep = pipeline.engines["unet_deep"]
    inputs = {t.name: allocate(t, AXES).zero_() for t in deep.spec.inputs}
    outputs = {t.name: allocate(t, AXES).fill_(7) for t in deep.spec.outputs}
    strikes.during(lambda: deep(inputs, outputs), 0.02)
    kept = {name: tensor.fill_(7).clone() for name, tensor in outputs.items()}
    torch.ones(200, 200) @ torch.ones(200, 200)
    assert all(torch.equal(outputs[name], kept[name]) for name in kept), "written to after it"


def main(seed: int, count: int) -> None:
    pipeline = engines.load("mini", "onnxruntime")
    expected = [result.image for result in pipeline.generate(ASKED)]
    strikes = Strikes(seed)
    while strikes.struck < count:
        strikes.during(lambda: pipeline.generate(ASKED), 0.04)
        written_after(pipeline, strikes)
    faulthandler.cancel_dump_traceback_later()
    for result, image in zip(pipeline.generate(ASKED), expected, strict=True):
        assert result.image is not None and image is not None
        torch.testing.assert_close(result.image, image, atol=1e-4, rtol=0)
    print(strikes.struck)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
