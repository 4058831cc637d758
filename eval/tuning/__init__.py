"""`sdxl tune`: which steps of a model should be deep, by measurement and checks on pictures."""
