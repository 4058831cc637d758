"""TensorRT as a backend: builds, loads and runs plans."""
