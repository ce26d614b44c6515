"""Before the first step: the lines that describe a run, and all reasons to refuse it."""
