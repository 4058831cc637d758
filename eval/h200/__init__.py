"""The measurements of one H200."""
