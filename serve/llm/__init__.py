"""Language models: served by the same front ends, and used to expand prompts of pictures."""
