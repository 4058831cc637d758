"""The training of the embedded image model, `sdxl.mini`."""
