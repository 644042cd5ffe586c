"""Functions of the graph: the inputs, parameters and resources of the rules in rules/*.smk."""
