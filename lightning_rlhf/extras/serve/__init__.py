"""`lightning-rlhf serve`: vLLM's OpenAI server with an API key and limits."""
