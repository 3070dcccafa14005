"""Tools beside the library, which imports none of them: planner, server, inspector and their commands."""
