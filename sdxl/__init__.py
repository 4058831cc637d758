"""Stable Diffusion XL with DeepCache: the model, its sampler and the in-flight loop.

Nothing heavy is imported here; ask for a module by name (`from sdxl.pipeline import Pipeline`).
"""

__version__ = "0.1.0"
