"""`zerotrain remove`: the results of a run, and what of them others use."""
