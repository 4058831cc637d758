"""The double of TensorRT has no name that the real libraries lack. Without a GPU the runtime is
tested on the double alone, so these tests tie it to the installed versions.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from tests.engines import trt_double

CLASSES = ("ICudaEngine", "IExecutionContext", "IRuntimeConfig", "Runtime")
ENUMS = ("ExecutionContextAllocationStrategy", "DynamicShapesKernelSpecializationStrategy")


LEAN = "tensorrt_lean_bindings.tensorrt_lean"
REAL = {"tensorrt_rtx": "tensorrt_rtx", "tensorrt": LEAN}
"""`tensorrt` is only on its vendor's index; its lean runtime has the same classes."""
OF_RTX = {
    "IExecutionContext": ["is_stream_capturable"],
    "IRuntimeConfig": ["dynamic_shapes_kernel_specialization_strategy"],
}
"""the names that only TensorRT-RTX has, by class"""


@pytest.fixture(scope="module", params=REAL.values(), ids=list(REAL))
def real(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param)


def public(what: object) -> list[str]:
    return [name for name in vars(what) if not name.startswith("_")]


@pytest.mark.parametrize("name", CLASSES)
def test_every_attribute_is_tensorrts(real: Any, name: str) -> None:
    double = getattr(trt_double, name)
    missing = [a for a in public(double) if not hasattr(getattr(real, name), a)]
    expected = OF_RTX.get(name, []) if real.__name__ == LEAN else []
    assert missing == expected, f"{name} of {real.__name__} lacks {missing}"


@pytest.mark.parametrize("name", CLASSES)
def test_every_argument_is_tensorrts(real: Any, name: str) -> None:
    """The arguments have the same names and order in at least one overload of the real method."""
    double = getattr(trt_double, name)
    for method in public(double):
        function = inspect.getattr_static(double, method)
        if not inspect.isfunction(function) or method == "create_execution_context":
            continue
        if real.__name__ == LEAN and method in OF_RTX.get(name, []):
            continue
        ours = [p for p in inspect.signature(function).parameters if p != "self"]
        overloads = re.findall(
            rf"{method}\(self: [\w.]+,? ?(.*?)\) ->", getattr(real, name).__dict__[method].__doc__
        )
        theirs = [re.findall(r"(\w+): [a-z]", arguments) for arguments in overloads]
        assert ours in theirs, f"{name}.{method} takes {theirs}, the double {ours}"


def test_contexts_are_made_from_a_strategy_or_a_configuration(real: Any) -> None:
    text = real.ICudaEngine.create_execution_context.__doc__
    assert "strategy: " in text and "runtime_config: " in text


@pytest.mark.parametrize("name", ENUMS)
def test_every_choice_is_tensorrts(real: Any, name: str) -> None:
    if real.__name__ == LEAN and name == ENUMS[1]:
        pytest.skip("TensorRT-RTX's alone")
    choices = vars(getattr(trt_double.TensorRTDouble, name))
    missing = [c for c in choices if not hasattr(getattr(real, name), c)]
    assert not missing, f"{name} of {real.__name__} lacks {missing}"


def test_the_logger_is_made_from_a_severity(real: Any) -> None:
    real.Logger(real.Logger.WARNING)


def test_what_the_worker_builds_with_is_tensorrts() -> None:
    real = pytest.importorskip("tensorrt_rtx")
    from engines.trt.flavours import TENSORRT_RTX
    from engines.trt.plan_worker import DTYPES

    assert hasattr(real.LayerType, "ATTENTION_INPUT")
    assert hasattr(real.IAttentionInputLayer, "attention")
    assert hasattr(real.IAttention, "decomposable")
    architectures = {n for n in dir(real.ComputeCapability) if n.startswith("SM")}
    assert set(TENSORRT_RTX.architectures) == architectures
    assert all(hasattr(real.DataType, name) for name in DTYPES.values())
    methods = ("phase_start", "step_complete", "phase_finish")
    assert all(hasattr(real.IProgressMonitor, name) for name in methods)
    assert hasattr(real.BuilderFlag, "REQUIRE_USER_ALLOCATION")
