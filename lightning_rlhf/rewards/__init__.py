"""Reward functions: their execution, built-in ones, and shaping of learned scores."""
