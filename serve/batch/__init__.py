"""The offline rendering job: `sdxl batch`."""
