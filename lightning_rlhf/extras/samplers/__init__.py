"""Samplers of rows."""
