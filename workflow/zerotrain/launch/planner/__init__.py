"""Planning: what a launch will need of a machine, predicted before it uses any of it."""
