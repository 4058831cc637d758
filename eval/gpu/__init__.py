"""The measurements of one GPU."""
