"""The language model and the scalar model, and the loading of their weights."""
