"""PyTorch as a backend: the reference on a CPU, our kernels on a GPU."""
