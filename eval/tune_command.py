"""`sdxl tune` for image models, and `sdxl tune llm`."""

from __future__ import annotations

from collections.abc import Sequence

from sdxl.params import InvalidParams


def main(argv: Sequence[str]) -> int:
    match list(argv):
        case ["llm", *rest]:
            from eval.llm.tune import main as tune_llm

            return tune_llm(rest)
        case [name, *_] if not name.startswith("-"):
            raise InvalidParams("tune", name, "must be llm, or flags for a model of pictures")
        case flags:
            from eval.tuning.command import main as tune_pictures

            return tune_pictures(flags)
