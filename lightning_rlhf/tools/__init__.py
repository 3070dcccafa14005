"""Tools that use the library and that it never imports: planner, server, inspector and their commands."""
