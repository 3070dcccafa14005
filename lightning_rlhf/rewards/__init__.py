"""What a response is worth: rules, adapters around users' functions, and shaping of learned scores."""
