"""The language model, the scalar model, LoRA adapters, and the loading of weights."""
