"""The embedded language model: it turns a short prompt into a full caption of `sdxl.mini`."""
