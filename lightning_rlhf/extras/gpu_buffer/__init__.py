"""Pushes of weights within a GPU that trainer and engine share."""
