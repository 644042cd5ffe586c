"""Launch files of a phase: every value resolved, with its source, before a process starts."""
