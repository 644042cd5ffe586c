"""Launch files of a phase: every value is resolved, with its source, before a process starts."""
