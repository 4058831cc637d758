"""The recorded parameters of guided decoding."""

from __future__ import annotations

from serve.llm import trtllm_api

from . import recorded

FIELDS = trtllm_api.record()["GuidedDecodingParams (tensorrt_llm.sampling_params)"]
GuidedDecodingParams = recorded("GuidedDecodingParams", FIELDS)
