"""stable-diffusion-webui's API, as far as this service supports it."""

PREFIX = "/sdapi/v1"
CONTROLNET = "/controlnet"
"""Prefix of the routes of its extension for ControlNets."""
WITH_PICTURES = (
    *(f"{PREFIX}/{name}" for name in ("txt2img", "img2img", "png-info")),
    f"{CONTROLNET}/detect",
)
"""Routes whose requests contain pictures."""
