"""The page of a run, the summary at its end, and the inspector that serves both."""
