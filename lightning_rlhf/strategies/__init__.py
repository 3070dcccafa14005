"""Strategies that distribute each role over devices."""
