"""Copies of checkpoints at URLs."""
