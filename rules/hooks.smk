"""This part of the workflow looks after what is around the graph: what must hold before the first
job, jobs that are forced, and DVC's records.

OUTPUTS: none
"""

from zerotrain.graph import hooks

if workflow.is_main_process:
    hooks.report_versions(CURRENCY)
