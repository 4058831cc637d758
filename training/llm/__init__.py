"""The training of the embedded language model, `serve/llm/mini`."""
