"""Planning: what a launch will take of a machine, told before any of it is taken."""
