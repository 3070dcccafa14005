"""LightningModules that hold the models and train them."""
