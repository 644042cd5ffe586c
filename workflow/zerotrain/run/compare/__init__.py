"""`zerotrain compare`: runs and phases next to one another."""
