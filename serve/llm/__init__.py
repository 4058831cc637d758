"""Language models beside the image model: served over the same front, expanding its prompts."""
