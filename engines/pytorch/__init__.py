"""PyTorch as a backend: the reference on a CPU, Triton kernels on a GPU."""
