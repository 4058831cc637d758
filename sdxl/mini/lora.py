"""The LoRAs of the embedded model: their folder, and the file names of the two usual layouts."""

from __future__ import annotations

from pathlib import Path

LORAS = Path(__file__).parent / "loras"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PEFT_PREFIX = "base_model.model."
