"""Which steps of a model should be deep: found by measurement, checked on whole pictures."""
