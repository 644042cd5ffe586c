"""DVC's side of a run: its pipeline, its agreement with Snakemake, and what it has stored.

Snakemake owns the graph. DVC stores what it makes by content, and runs it stage by stage.

- `jobs`: the graph itself, as Snakemake sees it.
- `pipeline`: dvc.yaml, written from the graph.
- `agreement`: the books of both tools, kept equal.
- `records`: Snakemake's book, written where DVC has brought files.
- `storage`: DVC's repository, and files brought back from its cache and remote.
- `commits`: what the name of a revision means, and moving to it.
- `history`: the commit and the inputs that made weights of unknown origin.
- `restore`: all results of a commit brought back, and nothing left to do.
- `tracking`: a user's dataset, handed to DVC.
"""
