"""Rollout engine for a vLLM server: engine, HTTP client, weight transfer and the server's plugin."""
