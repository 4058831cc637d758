"""How fast the networks and the loop are, beside others and beside the floor."""
