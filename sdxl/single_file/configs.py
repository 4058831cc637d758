"""The configurations and tokenizers of SDXL 1.0, which a single file lacks.

The tokenizers' vocabulary is CLIP's, derived from its merges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Config = dict[str, Any]

MERGES = Path(__file__).parent / "clip_bpe" / "merges.txt"
END_OF_WORD, START, END = "</w>", "<|startoftext|>", "<|endoftext|>"
CLIP = {"vocab_size": 49408, "bos_token_id": 49406, "eos_token_id": 49407}

SDXL_1_0: Mapping[str, Mapping[str, Any]] = {
    "text_encoder": {
        "architectures": ["CLIPTextModel"],
        **CLIP,
        "pad_token_id": 49407,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "projection_dim": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_act": "quick_gelu",
    },
    "text_encoder_2": {
        "architectures": ["CLIPTextModelWithProjection"],
        **CLIP,
        "pad_token_id": 0,
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "projection_dim": 1280,
        "num_hidden_layers": 32,
        "num_attention_heads": 20,
        "hidden_act": "gelu",
    },
    "unet": {
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": [320, 640, 1280],
        "layers_per_block": 2,
        "transformer_layers_per_block": [1, 2, 10],
        "attention_head_dim": [5, 10, 20],
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
        "sample_size": 128,
    },
    "vae": {
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "in_channels": 3,
        "out_channels": 3,
        "block_out_channels": [128, 256, 512, 512],
        "layers_per_block": 2,
        "latent_channels": 4,
        "scaling_factor": 0.13025,
        "sample_size": 1024,
    },
}

_UNET = SDXL_1_0["unet"]
REFINER_1_0: Mapping[str, Mapping[str, Any]] = {
    "text_encoder_2": SDXL_1_0["text_encoder_2"],
    "unet": {
        **_UNET,
        "down_block_types": [*_UNET["down_block_types"], "DownBlock2D"],
        "up_block_types": ["UpBlock2D", *_UNET["up_block_types"]],
        "block_out_channels": [384, 768, 1536, 1536],
        "transformer_layers_per_block": 4,
        "attention_head_dim": [6, 12, 24, 24],
        "cross_attention_dim": 1280,
        "projection_class_embeddings_input_dim": 2560,
    },
    "vae": SDXL_1_0["vae"],
}
REFINER_INDEX: Config = {
    "_class_name": "StableDiffusionXLImg2ImgPipeline",
    "requires_aesthetics_score": True,
    "text_encoder": [None, None],
    "tokenizer": [None, None],
}


def write_tokenizer(folder: Path, pad: str, merges: Sequence[str] = ()) -> None:
    """Write a tokenizer as transformers stores it, by default with CLIP's merges. SDXL's two differ
    in the padding token."""
    folder.mkdir(parents=True, exist_ok=True)
    merges = merges or MERGES.read_text(encoding="utf-8").splitlines()[1:]
    text = "\n".join(("#version: 0.2", *merges, ""))
    (folder / "merges.txt").write_text(text, encoding="utf-8")
    _write(folder / "vocab.json", clip_vocabulary(merges))
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": pad}
    _write(folder / "special_tokens_map.json", special)
    facts = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "do_lower_case": True}
    _write(folder / "tokenizer_config.json", {**facts, **special})


def clip_vocabulary(merges: Sequence[str]) -> dict[str, int]:
    """Return the ids of all bytes, bytes at the end of words, merges and two special tokens."""
    letters = byte_letters()
    words = [*letters, *(letter + END_OF_WORD for letter in letters)]
    words += [merge.replace(" ", "") for merge in merges]
    return {word: number for number, word in enumerate([*words, START, END])}


def byte_letters() -> list[str]:
    """Return GPT-2's printable letter for each byte, in CLIP's order. Printable bytes come first
    and are their own letters."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    plain += range(ord("®"), ord("ÿ") + 1)
    others = 256 - len(plain)
    return [*map(chr, plain), *(chr(256 + number) for number in range(others))]


def scheduler_config(base: Mapping[str, Any], names: set[str], marks: Mapping[str, str]) -> Config:
    """Return `base` with the settings that the file states: by tensors named `v_pred` and `ztsnr`,
    as in ComfyUI and stable-diffusion-webui, or by metadata of ModelSpec and kohya."""
    is_v = "v_pred" in names or marks.get("modelspec.prediction_type") in ("v", "v_prediction")
    has_zero_snr = "ztsnr" in names or marks.get("ss_zero_terminal_snr") == "True"
    config = dict(base)
    if is_v:
        config["prediction_type"] = "v_prediction"
    if has_zero_snr:
        config |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return config


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
