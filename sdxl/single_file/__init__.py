"""Checkpoints in one safetensors file, as used by stable-diffusion-webui, ComfyUI and Civitai.

Each is converted once into a folder in diffusers layout.
"""
