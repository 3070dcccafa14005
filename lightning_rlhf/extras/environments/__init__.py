"""Environments, tool parsers and conversation formats of other libraries, each imported when it is used."""
