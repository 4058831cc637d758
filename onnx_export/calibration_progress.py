"""How far a calibration is, in words. It knows neither clock nor prompts."""

from __future__ import annotations

MINUTE, HOUR = 60, 3600


def progress_line(done: int, count: int, took_s: float) -> str:
    """`took_s`: for those that are done; the others are taken to need as long each."""
    line = f"calibrated {done} of {count} prompts"
    left_s = took_s / done * (count - done)
    return f"{line}, about {in_words(left_s)} left" if done < count else line


def in_words(seconds: float) -> str:
    """To the next whole second, minute or tenth of an hour."""
    if seconds < 2 * MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 2 * HOUR:
        return f"{seconds / MINUTE:.0f} minutes"
    return f"{seconds / HOUR:.1f} hours"
