"""The optimizers and their parameter groups."""
