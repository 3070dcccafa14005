"""The rollout loop and what steers it."""
