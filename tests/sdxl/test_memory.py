"""The reported peak is the process's own."""

import platform
import subprocess
import sys

import pytest

MIB = 2**20


def test_memory_that_was_freed_again_counts() -> None:
    code = """
from sdxl.memory import peak_bytes
held = bytearray(256 << 20)
del held
print(peak_bytes())
"""
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    assert int(output) > 256 * MIB


def test_a_small_child_of_a_large_process_is_small() -> None:
    held = bytearray(256 * MIB)
    code = "from sdxl.memory import peak_bytes; print(peak_bytes())"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    assert int(output) < 64 * MIB < len(held)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own")
def test_what_was_freed_goes_back_to_the_system() -> None:
    code = """
import torch
from sdxl.memory import give_back
def now():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
held = [torch.ones(16 * 1024) for _ in range(4096)]
kept = held[::64]
del held
before = now()
give_back()
print(before - now())
"""
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    assert int(output) > 128 * MIB
