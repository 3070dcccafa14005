"""Engines that generate responses, and the assembly of a rollout from them."""
