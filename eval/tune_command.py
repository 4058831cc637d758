"""`sdxl tune`: what is best for a model on this machine, found by trials."""

from __future__ import annotations

from collections.abc import Sequence

from sdxl.params import InvalidParams


def main(argv: Sequence[str]) -> int:
    match list(argv):
        case ["llm", *rest]:
            from eval.llm.tune import main as tune_llm

            return tune_llm(rest)
        case _:
            raise InvalidParams("tune", argv[0] if argv else None, "needed llm")
