"""Layouts of rows in the tensors that models read."""
