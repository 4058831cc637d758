"""Speed: beside peers, and beside the floor."""
