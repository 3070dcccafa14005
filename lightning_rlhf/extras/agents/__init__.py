"""Agents with a loop of their own: programs that ask the engine through an OpenAI endpoint during a rollout."""
