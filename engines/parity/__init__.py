"""How near one set of engines is to another: what both compute, and figures beside their bounds."""
