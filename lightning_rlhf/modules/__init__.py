"""LightningModules: they own everything that has parameters and learn from what they are handed."""
