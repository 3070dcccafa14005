"""Images of rows: reading with limits, and the tokens and tensors that a model's processor makes of them."""
