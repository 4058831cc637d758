"""The peak that is reported is the process's own."""

import subprocess
import sys

import pytest

from sdxl.memory import peak_bytes

MIB = 2**20


@pytest.mark.slow
def test_it_counts_what_was_held_and_given_back() -> None:
    before = peak_bytes()
    held = bytearray(before + 32 * MIB)
    del held
    assert peak_bytes() >= before + 32 * MIB


def test_a_small_child_of_a_large_process_is_small() -> None:
    held = bytearray(256 * MIB)
    code = "from sdxl.memory import peak_bytes; print(peak_bytes())"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    assert int(said) < 64 * MIB < len(held)
