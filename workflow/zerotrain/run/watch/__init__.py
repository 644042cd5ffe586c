"""`zerotrain watch`: the state of a run, read from its files, and its drawing in a terminal."""
