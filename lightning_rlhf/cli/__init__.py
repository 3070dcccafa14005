"""Command line: parsing of configurations, and one module per command."""
