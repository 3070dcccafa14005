"""Rewards that run code of the model, and the sandbox in which it runs."""
