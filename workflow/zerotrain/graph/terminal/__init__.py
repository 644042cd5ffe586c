"""The terminal's output while Snakemake runs the stages.

- `handler`: Snakemake's log records as lines: one when a stage starts, one when it ends.
- `reasons`: why a job runs.
- `changes`: which values of a job's parameters changed.

`zerotrain.machine.output` handles output that goes only to a stage's log: details and libraries'
lines.
"""
