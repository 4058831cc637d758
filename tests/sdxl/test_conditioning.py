"""Conditioning, against diffusers' encode_prompt on tiny random text encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from sdxl import conditioning
from sdxl.conditioning import Conditioning, encode, tokenize_rows
from sdxl.engine import Engines
from sdxl.params import GenerationParams, InvalidParams
from sdxl.prompt import Tokenizer
from sdxl.specs import CHUNK, ModelSpec, network_specs
from tests import fakes

ARCH = replace(fakes.ARCH, clip_l_width=16, clip_g_width=24, pooled_width=20, sample_size=16)
LONG = "the red ring on the star, " * 20


@dataclass
class EncoderEngine:
    """A transformers text encoder as an Engine. It records the chunks of each call."""

    model: Any
    spec: ModelSpec
    calls: list[int] = field(default_factory=list)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        ids = inputs["token_ids"]
        self.calls.append(len(ids))
        with torch.no_grad():
            result = self.model(ids, output_hidden_states=True)
        hidden, *pooled = (spec.name for spec in self.spec.outputs)
        outputs[hidden].copy_(result.hidden_states[-2])
        if pooled:
            outputs[pooled[0]].copy_(result.text_embeds)


@dataclass
class Setup:
    tokenizers: tuple[Tokenizer, Tokenizer]
    theirs: tuple[Any, Any]
    models: tuple[Any, Any]

    def engines(self, dtype: str = "float32") -> Engines:
        specs = network_specs(ARCH, dtype)
        networks: dict[str, Any] = {n: fakes.FakeEngine(spec) for n, spec in specs.items()}
        for name, model in zip(("clip_l", "clip_g"), self.models, strict=True):
            networks[name] = EncoderEngine(model, specs[name])
        return Engines(ARCH, networks)

    def encode(
        self, requests: Sequence[GenerationParams], force_zeros: bool = True, **options: Any
    ) -> list[Conditioning]:
        engines = options.pop("engines", None) or self.engines()
        prompts = [tokenize_rows(each, self.tokenizers, force_zeros) for each in requests]
        return encode(requests, prompts, engines, **options)

    def reference(self, request: GenerationParams, force_zeros: bool) -> tuple[Tensor, Tensor]:
        """Return context and pooled vector as diffusers' pipeline makes them."""
        pipeline = StableDiffusionXLPipeline(
            vae=None,
            text_encoder=self.models[0],
            text_encoder_2=self.models[1],
            tokenizer=self.theirs[0],
            tokenizer_2=self.theirs[1],
            unet=None,
            scheduler=None,
            force_zeros_for_empty_prompt=force_zeros,
            add_watermarker=False,
        )
        with torch.no_grad():
            context, negative, pooled, negative_pooled = pipeline.encode_prompt(
                request.prompt,
                device="cpu",
                do_classifier_free_guidance=request.is_guided,
                negative_prompt=request.negative_prompt,
            )
        if request.is_guided:
            return torch.cat([context, negative]), torch.cat([pooled, negative_pooled])
        return context, pooled

    def chunked(self, text: str) -> tuple[Tensor, Tensor]:
        """Return a long prompt's context and pooled vector, with one call for each chunk."""
        contexts, pooled = [], []
        for tokenizer, model in zip(self.theirs, self.models, strict=True):
            ids = tokenizer(text).input_ids
            hidden = []
            for start in range(1, max(len(ids) - 1, 2), CHUNK - 2):
                body = ids[1:-1][start - 1 : start + CHUNK - 3]
                chunk = [ids[0], *body, ids[-1]]
                chunk += [tokenizer.pad_token_id] * (CHUNK - len(chunk))
                with torch.no_grad():
                    output = model(torch.tensor([chunk]), output_hidden_states=True)
                hidden.append(output.hidden_states[-2][0])
                pooled.append(output[0])
            contexts.append(torch.cat(hidden))
        return torch.cat(contexts, dim=-1), pooled[len(pooled) // 2][0]


@pytest.fixture(scope="module")
def setup(tokenizer_folders: tuple[Path, Path]) -> Setup:
    torch.manual_seed(0)
    theirs = [CLIPTokenizer.from_pretrained(folder) for folder in tokenizer_folders]
    models = []
    for tokenizer, kind, width in zip(
        theirs, (CLIPTextModel, CLIPTextModelWithProjection), (16, 24), strict=True
    ):
        config = CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            projection_dim=ARCH.pooled_width,
            num_hidden_layers=3,
            num_attention_heads=2,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        models.append(kind(config).eval())
    first, second = (Tokenizer.from_folder(folder) for folder in tokenizer_folders)
    return Setup((first, second), (theirs[0], theirs[1]), (models[0], models[1]))


def request(prompt: str, negative: str | None = None, **changes: Any) -> GenerationParams:
    changes = {"width": 64, "height": 128, **changes}
    return GenerationParams(prompt=prompt, negative_prompt=negative, **changes)


def assert_close(found: Tensor, needed: Tensor, what: str) -> None:
    torch.testing.assert_close(found, needed, rtol=0, atol=1e-5, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("guidance", [1.0, 5.0])
@pytest.mark.parametrize("force_zeros", [True, False])
@pytest.mark.parametrize("negative", [None, "", "the star!"])
@pytest.mark.parametrize("prompt", ["", "a red ring, on the star!"])
def test_short_prompts_equal_diffusers(
    setup: Setup, prompt: str, negative: str | None, force_zeros: bool, guidance: float
) -> None:
    asked = request(prompt, negative, guidance=guidance)
    found = setup.encode([asked], force_zeros)[0]
    context, pooled = setup.reference(asked, force_zeros)
    assert_close(found.context, context, "context")
    assert_close(found.pooled, pooled, "pooled")


def test_time_ids_name_the_picture_size_in_every_row(setup: Setup) -> None:
    guided, plain = setup.encode([request("ring"), request("ring", guidance=1.0)])
    assert guided.time_ids.tolist() == [[128, 64, 0, 0, 128, 64]] * 2
    assert plain.time_ids.tolist() == [[128, 64, 0, 0, 128, 64]]
    assert (guided.rows, plain.rows, plain.tokens) == (2, 1, CHUNK)


def test_long_prompts_keep_every_chunk_and_pool_the_first(setup: Setup) -> None:
    found = setup.encode([request(LONG, guidance=1.0)])[0]
    context, pooled = setup.chunked(LONG)
    assert found.tokens > CHUNK and found.tokens % CHUNK == 0
    assert_close(found.context[0], context, "context")
    assert_close(found.pooled[0], pooled, "pooled")


@pytest.mark.parametrize(("prompt", "negative"), [(LONG, "star"), ("star", LONG), (LONG, None)])
def test_the_shorter_prompt_is_padded_with_empty_chunks(
    setup: Setup, prompt: str, negative: str | None
) -> None:
    found = setup.encode([request(prompt, negative)], force_zeros=False)[0]
    chunks = found.tokens // CHUNK
    empty = setup.chunked("")[0]
    for row, text in enumerate((prompt, negative or "")):
        context, pooled = setup.chunked(text)
        needed = torch.cat([context] + [empty] * (chunks - len(context) // CHUNK))
        assert_close(found.context[row], needed, f"context of {text[:9]!r}")
        assert_close(found.pooled[row], pooled, f"pooled of {text[:9]!r}")


def test_weights_scale_embeddings_and_keep_each_encoders_mean(setup: Setup) -> None:
    found, plain = setup.encode(
        [request(text, guidance=1.0) for text in ("the (red ring:1.4) [star]", "the red ring star")]
    )
    weights = torch.ones(CHUNK)
    weights[2:4], weights[4] = 1.4, 1 / 1.1
    parts = []
    for part in plain.context[0].split([ARCH.clip_l_width, ARCH.clip_g_width], dim=-1):
        weighted = part * weights[:, None]
        parts.append(weighted * (part.mean() / weighted.mean()))
    assert_close(found.context[0], torch.cat(parts, dim=-1), "context")
    assert torch.equal(found.pooled, plain.pooled)


def test_a_weight_in_one_chunk_leaves_the_others_alone(setup: Setup) -> None:
    weighted, plain = setup.encode(
        [request(LONG + "(ring:1.5)", guidance=1.0), request(LONG + "ring", guidance=1.0)]
    )
    assert torch.equal(weighted.context[:, :CHUNK], plain.context[:, :CHUNK])
    assert not torch.equal(weighted.context[:, CHUNK:], plain.context[:, CHUNK:])


def test_a_mixed_batch_equals_its_requests_alone(setup: Setup) -> None:
    requests = [
        request("ring", "star"),
        request(LONG, "star"),
        request("ring", guidance=1.0),
        request("(ring:2)", LONG, width=256),
        request("ring"),
    ]
    for found, asked in zip(setup.encode(requests), requests, strict=True):
        alone = setup.encode([asked])[0]
        assert_close(found.context, alone.context, f"context of {asked.prompt[:9]!r}")
        assert_close(found.pooled, alone.pooled, f"pooled of {asked.prompt[:9]!r}")
        assert torch.equal(found.time_ids, alone.time_ids)


def calls(engines: Engines) -> list[list[int]]:
    found = []
    for engine in (engines["clip_l"], engines["clip_g"]):
        assert isinstance(engine, EncoderEngine)
        found.append(engine.calls)
    return found


def test_one_call_per_encoder_holds_each_chunk_once(setup: Setup) -> None:
    engines = setup.engines()
    setup.encode(
        [request(p, "bad star") for p in ("ring", "star", "ring", "(ring)")], engines=engines
    )
    assert calls(engines) == [[3], [3]], "ring, star and the one negative prompt"


def test_no_call_has_more_than_the_allowed_chunks(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditioning, "MAX_CHUNKS_PER_CALL", 2)
    engines = setup.engines()
    requests = [request(f"ring {n}", guidance=1.0) for n in range(5)]
    setup.encode(requests, engines=engines)
    assert calls(engines) == [[2, 2, 1]] * 2


def test_fixed_calls_give_the_same_bytes_whatever_the_neighbours(setup: Setup) -> None:
    requests = [request(f"ring {n}", "star", guidance=5.0) for n in range(5)]
    engines = setup.engines()
    together = setup.encode(requests, engines=engines, fixed_chunks=2)
    assert calls(engines) == [[2, 2, 2]] * 2
    for found, asked in zip(together, requests, strict=True):
        alone = setup.encode([asked], fixed_chunks=2)[0]
        assert torch.equal(found.context, alone.context)
        assert torch.equal(found.pooled, alone.pooled)


def test_half_precision_engines_give_half_precision_rows(setup: Setup) -> None:
    half = setup.encode([request("(ring:1.2)", "star")], engines=setup.engines("float16"))[0]
    whole = setup.encode([request("(ring:1.2)", "star")])[0]
    for name in ("context", "pooled", "time_ids"):
        found, needed = getattr(half, name), getattr(whole, name)
        assert found.dtype == torch.float16
        assert (found.float() - needed).abs().max() < 0.01 * needed.abs().max(), name


def test_no_requests_make_no_calls(setup: Setup) -> None:
    engines = setup.engines()
    assert setup.encode([], engines=engines) == [] and calls(engines) == [[], []]


@pytest.mark.parametrize("field_name", ["prompt", "negative_prompt"])
def test_a_refusal_names_the_prompt_at_fault(setup: Setup, field_name: str) -> None:
    prompts = {"prompt": "ring", "negative_prompt": "star", field_name: "(ring:99)"}
    asked = request(prompts["prompt"], prompts["negative_prompt"])
    with pytest.raises(InvalidParams) as caught:
        setup.encode([asked])
    assert caught.value.field == field_name
