"""DVC's side of a run: its pipeline, and its agreement with Snakemake.

Snakemake owns the graph. DVC stores what it makes by content, and runs it stage by stage.
`pipeline` writes dvc.yaml from the graph, `agreement` keeps the books of both tools equal,
`records` writes Snakemake's where DVC has brought files, `jobs` is the graph itself.
"""
