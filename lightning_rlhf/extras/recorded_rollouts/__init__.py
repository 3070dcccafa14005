"""Responses of a run, kept to train on them again."""
