"""One module per command; ``run(arguments)`` receives the arguments after its name and returns an exit code."""
