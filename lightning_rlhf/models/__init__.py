"""What has parameters: the language model, the scalar model, and where their weights come from."""
