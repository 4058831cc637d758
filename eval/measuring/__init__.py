"""Shared by measurements: paired timings, the machine, its ceilings, intervals, PSNR, energy."""
