"""The JSON schema of configurations, and the early check that reads it."""
