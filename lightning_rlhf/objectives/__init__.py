"""What to optimise: frozen dataclasses whose fields are hyper-parameters and whose call is pure."""
