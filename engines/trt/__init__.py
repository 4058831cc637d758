"""TensorRT as a backend: plans built, loaded and run."""
