"""Reward functions that compare a response with a correct answer: mathematics, numbers, texts, choices."""
