"""Checkpoints that any strategy and number of ranks can load."""
