"""Commands besides training: data, generation, evaluation, export, a new project."""
