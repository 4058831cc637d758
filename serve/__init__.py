"""What a person or a client talks to: the service, the batch job, `sdxl render`."""
