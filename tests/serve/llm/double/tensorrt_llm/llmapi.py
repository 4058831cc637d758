"""The recorded configuration classes."""

from __future__ import annotations

from serve.llm import trtllm_api

from . import recorded

for kind, fields in trtllm_api.tables().values():
    globals()[kind] = recorded(kind, dict.fromkeys(fields))
for decoding_type in ("Eagle", "Draft_Target"):
    (kind,) = trtllm_api.SPECULATIVE[decoding_type]
    globals()[kind] = recorded(kind, dict.fromkeys(trtllm_api.speculative_names(decoding_type)))
