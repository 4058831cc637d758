"""GPUs by name, and which TensorRT builds for each of them."""

from __future__ import annotations

import pytest

from engines.folders.targets import TARGETS, target_of
from engines.trt.flavours import TENSORRT, TENSORRT_RTX, BackendMissing, check_buildable

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "capability", "key"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100"),
        ("NVIDIA H100 PCIe", (9, 0), "h100"),
        ("NVIDIA H200", (9, 0), "h200"),
        ("NVIDIA GH200 480GB", (9, 0), "gh200"),
        ("NVIDIA L40S", (8, 9), "l40s"),
        ("NVIDIA B200", (10, 0), "b200"),
    ],
)
def test_cudas_names_are_known(name: str, capability: tuple[int, int], key: str) -> None:
    assert target_of(name, capability, 48 * GIB) is TARGETS[key]


def test_a_gpu_outside_the_table_gets_a_row_of_its_own() -> None:
    found = target_of("NVIDIA GeForce RTX 4090", (8, 9), 24 * GIB)
    assert (found.key, found.sm, found.max_batch) == ("geforce-rtx-4090", "SM89", 3)
    assert found.precision == "fp16"


def test_a_slice_of_a_gpu_is_not_the_whole_one() -> None:
    found = target_of("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), 10 * GIB)
    assert (found.memory_gib, found.max_batch) == (10, 1)
    assert found.name not in {target.name for target in TARGETS.values()}


def test_tensorrt_builds_only_on_the_gpu_it_builds_for() -> None:
    h100, l40s = TARGETS["h100"], TARGETS["l40s"]
    check_buildable(TENSORRT, h100, h100)
    with pytest.raises(BackendMissing, match="found no NVIDIA GPU here, expected a H100"):
        check_buildable(TENSORRT, h100, None)
    with pytest.raises(BackendMissing, match="found a L40S here, expected a H100"):
        check_buildable(TENSORRT, h100, l40s)


def test_tensorrt_rtx_builds_anywhere_for_the_architectures_it_lists() -> None:
    check_buildable(TENSORRT_RTX, TARGETS["l40s"], None)
    with pytest.raises(BackendMissing, match="H100 is SM90; use --backend tensorrt on a H100"):
        check_buildable(TENSORRT_RTX, TARGETS["h100"], None)
    check_buildable(TENSORRT_RTX, TARGETS["h100"], TARGETS["h100"])
