"""How good the pictures are: what is painted, what judges it, and what it costs in speed."""
