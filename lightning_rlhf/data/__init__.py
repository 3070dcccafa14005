"""Data modules: read rows of common formats, tokenize them and serve batches of token ids."""
