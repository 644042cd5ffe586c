"""The cluster that jobs run on, as its scheduler describes it."""
