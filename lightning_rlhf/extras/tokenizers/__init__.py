"""Tokenizers for models that are trained from scratch."""
