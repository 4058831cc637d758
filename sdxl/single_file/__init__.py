"""Checkpoints in one safetensors file, as stable-diffusion-webui, ComfyUI and Civitai know them.

Such a file is turned once into a folder in diffusers layout, and from then on it is a folder.
"""
