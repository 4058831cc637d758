"""Everything there is to measure on one H200."""
