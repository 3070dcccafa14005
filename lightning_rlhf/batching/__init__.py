"""How rows become the tensors that models read."""
