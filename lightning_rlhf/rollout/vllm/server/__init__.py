"""One vLLM server for all ranks: engine, HTTP client, weight transfer and the server's plugin."""
