"""The user-facing parts: the service, the batch job, `sdxl render`."""
