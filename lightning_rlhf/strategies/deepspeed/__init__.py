"""DeepSpeed: one engine per role."""
