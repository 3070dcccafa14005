"""What a run works without; the core never imports it."""
