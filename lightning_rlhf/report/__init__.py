"""Run directories: reading them, health checks of runs, and the report page."""
