"""What a run takes, on paper: memory of each GPU and bytes that it sends, from a configuration and without weights."""
