"""The DeepSpeed strategy, with one engine per role."""
