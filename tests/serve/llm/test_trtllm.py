"""The whole TensorRT-LLM adapter, over a double that has only the recorded names."""

from __future__ import annotations

import ast
import asyncio
import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from sdxl.params import InvalidParams
from serve.errors import Problem
from serve.llm import options, trtllm_api, trtllm_engine
from serve.llm.engine import Occupancy
from serve.llm.names import MINI
from serve.llm.speaker import Speaker
from serve.llm.text_orders import Delta, Ended
from serve.worker.loop_thread import SICK_AFTER
from serve.worker.stalls import Unhealthy
from tests.serve.llm.texts import CIRCLE, end_of, prompts, text_of, updates_of

DOUBLE = Path(__file__).parent / "double"
SAID = "a red circle with café on blue"
NAMES = ("tensorrt_llm", "tensorrt_llm.llmapi", "tensorrt_llm.sampling_params")


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(DOUBLE))
    yield importlib.import_module("tensorrt_llm")
    for name in NAMES:
        sys.modules.pop(name, None)


def engine_of(timeout_s: float = 30, **given: Any) -> trtllm_engine.TrtllmEngine:
    return trtllm_engine.load(str(MINI), given, timeout_s)


def speaker_of(engine: trtllm_engine.TrtllmEngine) -> Speaker:
    return Speaker("llm", prompts(), engine)


def run(engine: trtllm_engine.TrtllmEngine, **sampling: Any) -> Any:
    order = replace(CIRCLE, sampling=replace(CIRCLE.sampling, **sampling))
    return asyncio.run(updates_of(speaker_of(engine), order))


def test_cumulative_text_becomes_deltas_without_half_characters() -> None:
    engine = engine_of()
    updates = run(engine)
    assert text_of(updates) == SAID and not any("\ufffd" in u.text for u in updates[1:-1])
    assert end_of(updates) == Ended("stop", 4, 9)
    assert not engine.llm.open and engine.llm.aborted == 0


def test_we_render_the_chat_and_send_token_ids() -> None:
    engine = engine_of()
    run(engine)
    assert engine.llm.asked == [prompts().ids(CIRCLE)]


def test_sampling_arrives_under_its_names() -> None:
    engine = engine_of(guided_decoding_backend="xgrammar")
    run(engine, temperature=0.5, top_p=0.9, seed=7, stop=("x",), json_schema='{"type": "object"}')
    run(engine, json_schema="{}")
    warm, greedy = engine.llm.params
    assert (warm.temperature, warm.top_p, warm.seed, warm.stop) == (0.5, 0.9, 7, ["x"])
    assert warm.guided_decoding.json == '{"type": "object"}' and warm.top_k is None
    assert greedy.top_k == 1 and greedy.temperature is None
    assert greedy.guided_decoding.json_object is True


def test_the_finish_reason_is_length() -> None:
    assert end_of(run(engine_of(), max_tokens=2)) == Ended("length", 4, 2)


def test_a_stop_string_ends_it_and_aborts() -> None:
    engine = engine_of()
    assert text_of(run(engine, stop=("cle w",))) == "a red cir"
    assert not engine.llm.open


async def test_leaving_aborts_the_request() -> None:
    engine = engine_of()

    async with aclosing(speaker_of(engine).generate(CIRCLE)) as updates:
        async for update in updates:
            if isinstance(update, Delta):
                break
    assert engine.llm.aborted == 1 and not engine.llm.open


@pytest.mark.parametrize("reason", ["timeout", "cancelled"])
def test_a_request_that_the_engine_gives_up_is_a_503(reason: str) -> None:
    engine = engine_of()
    engine.llm.reason = reason
    with pytest.raises(Problem) as caught:
        run(engine)
    assert caught.value.status == 503


def test_failures_make_a_replica_unhealthy_only_if_they_continue() -> None:
    engine = engine_of()
    engine.llm.fault = RuntimeError("CUDA error: /secret")
    for _ in range(SICK_AFTER):
        engine.check_health()
        with pytest.raises(Problem) as caught:
            run(engine)
        assert caught.value.status == 500 and "secret" not in caught.value.message
    with pytest.raises(Unhealthy):
        engine.check_health()
    engine.llm.fault = None
    run(engine)
    engine.check_health()


def test_an_answer_that_a_stop_string_ends_was_no_failure() -> None:
    engine = engine_of()
    for _ in range(SICK_AFTER):
        engine.llm.fault = RuntimeError("CUDA error")
        with pytest.raises(Problem):
            run(engine)
        engine.llm.fault = None
        assert end_of(run(engine, stop=("red",))).reason == "stop"
    engine.check_health()


def test_an_unsupported_schema_makes_no_replica_unhealthy() -> None:
    engine = engine_of(guided_decoding_backend="xgrammar")
    engine.llm.fault = ValueError("no grammar for this")
    for _ in range(SICK_AFTER):
        with pytest.raises(Problem):
            run(engine, json_schema='{"type": "strange"}')
    engine.check_health()


def test_the_context_of_a_model_that_reads_pictures_is_that_of_its_text(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 4096}
    AutoConfig.for_model("gemma3", text_config=text).save_pretrained(tmp_path)
    assert trtllm_engine.load(str(tmp_path), {}, 30).context == 4096


def test_a_start_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_START_S", "3")
    with pytest.raises(trtllm_engine.StartTimeout, match="0 s"):
        engine_of(timeout_s=0.2)


def test_a_start_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, double: Any) -> None:
    def fail() -> None:
        raise MemoryError("no room for the KV cache")

    monkeypatch.setattr(double.LLM, "before_start", staticmethod(fail))
    with pytest.raises(MemoryError, match="no room"):
        engine_of()


async def test_the_cache_s_use_is_known_while_it_writes() -> None:
    """TensorRT-LLM's statistics end only after the answer. The occupancy must not wait for them."""
    engine = engine_of()
    engine.llm.token_s = 0.2
    writing = asyncio.create_task(updates_of(speaker_of(engine), CIRCLE))
    while not (occupancy := await engine.occupancy()).kv_share and not writing.done():
        await asyncio.sleep(0.01)
    assert not writing.done()
    writing.cancel()
    assert occupancy == Occupancy(1, 0, 1 / 8)


def test_a_blocking_call_for_statistics_delays_no_answer() -> None:
    engine = engine_of()
    is_answered = threading.Event()
    results: list[bool] = []
    engine.llm.before_stats = lambda: results.append(is_answered.wait(60))
    updates = asyncio.run(updates_of(speaker_of(engine), CIRCLE))
    is_answered.set()
    assert text_of(updates) == SAID and False not in results


def test_a_prompt_that_no_step_can_read_is_the_client_s_error_and_no_failure() -> None:
    engine = engine_of(max_num_tokens=3)
    for _ in range(SICK_AFTER):
        with pytest.raises(Problem, match="4 tokens; this server reads at most 3") as caught:
            run(engine)
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    engine.check_health()
    assert end_of(run(engine_of(max_num_tokens=3, enable_chunked_prefill=True))).reason == "stop"


LLAMA_70B: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "max_batch_size": 64,
    "max_seq_len": 256,
    "enable_chunked_prefill": True,
    "guided_decoding_backend": "xgrammar",
    "kv_cache_config": {
        "enable_block_reuse": True,
        "free_gpu_memory_fraction": 0.9,
        "dtype": "fp8",
    },
    "speculative_config": {
        "decoding_type": "Eagle3",
        "max_draft_len": 3,
        "speculative_model": "/models/eagle3",
        "eagle3_one_model": True,
    },
}


def test_options_reach_tensorrt_llm_under_its_own_names() -> None:
    options.check(LLAMA_70B, "tensorrt-llm")
    engine = engine_of(**LLAMA_70B)
    given = engine.llm.given
    assert given["tensor_parallel_size"] == 2 and given["kv_cache_config"].dtype == "fp8"
    assert given["speculative_config"].max_draft_len == 3
    assert engine.context == 256 and engine.has_json and options.gpus_of(LLAMA_70B) == 4
    draft: dict[str, Any] = {"decoding_type": "Draft_Target", "speculative_model": "/m"}
    draft["max_draft_len"] = 4
    assert engine_of(speculative_config=draft).llm.given["speculative_config"].max_draft_len == 4


def test_tables_become_objects_of_their_own_classes() -> None:
    given: dict[str, Any] = {
        "cuda_graph_config": {"batch_sizes": [1, 8, 64], "enable_padding": True},
        "moe_config": {"backend": "CUTLASS", "max_num_tokens": 8192},
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
        "torch_compile_config": {"enable_piecewise_cuda_graph": True},
    }
    options.check(given, "tensorrt-llm")
    reached = engine_of(**given).llm.given
    assert reached["cuda_graph_config"].batch_sizes == [1, 8, 64]
    assert reached["moe_config"].backend == "CUTLASS"
    assert reached["scheduler_config"].capacity_scheduler_policy == "MAX_UTILIZATION"
    assert reached["torch_compile_config"].enable_piecewise_cuda_graph is True
    classes = {name: type(reached[name]).__name__ for name in given}
    assert classes == {name: trtllm_api.tables()[name][0] for name in given}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"tensor_paralel_size": 8}, "tensor_paralel_size"),
        ({"model": "/m"}, "model"),
        ({"kv_cache_config": {"dtyp": "fp8"}}, "dtyp"),
        ({"kv_cache_config": True}, "kv_cache_config"),
        ({"speculative_config": {"decoding_type": "Magic"}}, "Magic"),
        ({"speculative_config": {"decoding_type": "Eagle"}}, "max_draft_len"),
        ({"speculative_config": {"decoding_type": "Eagle", "max_draft": 1}}, "max_draft"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"max_batch_size": True}, "max_batch_size"),
        ({"cuda_graph_config": {"batchsizes": [1]}}, "batchsizes"),
        ({"cuda_graph_config": True}, "cuda_graph_config must be a table, got True"),
        ({"moe_config": {"experts": 2}}, "experts"),
        ({"scheduler_config": {"policy": "MAX_UTILIZATION"}}, "policy"),
        ({"quant_config": {"quant_algo": "W4A16_AWQ"}}, "quant_config"),
        ({"attn_backend": {}}, "attn_backend must be a plain value, got {}"),
    ],
)
def test_unknown_options_are_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidParams, match=named):
        options.check(values, "tensorrt-llm")


def test_the_transformers_backend_takes_two_of_them() -> None:
    options.check({"max_batch_size": 4, "max_seq_len": 128}, "transformers")
    with pytest.raises(InvalidParams, match="kv_cache_config"):
        options.check({"kv_cache_config": {}}, "transformers")


# -- every name against the record ------------------------------------------------------------


def tree() -> ast.Module:
    return ast.parse(Path(trtllm_engine.__file__).read_text(encoding="utf-8"))


def arguments_of(function: str) -> set[str]:
    """Return the keywords that calls of this name pass."""
    return {
        str(keyword.arg)
        for node in ast.walk(tree())
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == function
        for keyword in node.keywords
        if keyword.arg is not None
    }


def read_from(variable: str) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree())
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == variable
    }


def test_the_adapter_uses_recorded_names_alone() -> None:
    """The double itself refuses other arguments of classes and other fields of outputs."""
    record = trtllm_api.record()
    answer = set(record["RequestOutput"]["properties"])
    methods = {m.partition("(")[0] for m in record["RequestOutput"]["methods"]}
    checks = {
        **{
            name: (arguments_of(name), set(record["LLM methods"][name]))
            for name in ("generate_async", "get_stats_async")
        },
        "answer": (read_from("answer"), answer),
        "request": (read_from("request"), methods),
        "tables": (set(trtllm_api.tables()), trtllm_api.llm_names()),
        "module": (read_from("module"), set(record["tensorrt_llm"])),
    }
    strange = {name: used - known for name, (used, known) in checks.items() if used - known}
    assert not strange, f"not in {trtllm_api.RECORD.name}: {strange}"
    assert all(used for used, _ in checks.values()), "a name here matches nothing in the adapter"
    reasons = set(record["CompletionOutput"]["finish_reason"])
    assert set(trtllm_engine.REASONS) <= reasons
