"""How long an answer may take by MLPerf's rules of Llama 2 70B: to its first token, and for each
token after it, both at the 99th percentile.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdxl.params import InvalidParams


@dataclass(frozen=True)
class TokenLimits:
    benchmark: str
    """LoadGen's own name of them"""
    first_s: float
    token_s: float

    @property
    def text(self) -> str:
        return f"{1000 * self.first_s:.0f} and {1000 * self.token_s:.0f} ms"


LIMITS = {
    "server": TokenLimits("llama2-70b", 2.0, 0.2),
    "interactive": TokenLimits("llama2-70b-interactive", 0.45, 0.04),
}


def limits_named(name: str) -> TokenLimits:
    if name not in LIMITS:
        raise InvalidParams("limits", name, f"needed one of {', '.join(LIMITS)}")
    return LIMITS[name]
