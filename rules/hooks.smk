"""This part of the workflow looks after what is around the graph: what a killed Snakemake left, jobs
that only a raised version asks for, damaged folders, and DVC's records.

OUTPUTS: none
"""

from zerotrain.pipeline.hooks import Hooks

HOOKS = Hooks(workflow, RUNS, Path(CONFIG))
