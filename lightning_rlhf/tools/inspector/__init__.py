"""Pages about runs that continue, and tables of runs."""
