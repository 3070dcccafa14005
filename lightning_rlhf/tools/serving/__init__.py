"""``lightning-rlhf serve``: vLLM's OpenAI server with a key and limits."""
