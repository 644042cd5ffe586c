"""DVC's side of a run: its pipeline, its sync with Snakemake, and the files that it stores.

Snakemake owns the graph. DVC stores what it makes by content, and runs it stage by stage.

- `jobs`: the graph, as Snakemake sees it.
- `pipeline`: dvc.yaml, written from the graph.
- `agreement`: keeps Snakemake's metadata and dvc.lock in sync.
- `records`: writes Snakemake's metadata of files that DVC restored.
- `changes`: between two calls, and during one.
- `storage`: DVC's repository, stages committed to it, and files restored from its cache and remote.
- `commits`: resolves a revision, moves to it, and finds the one that made weights.
- `restore`: all results of a commit restored, with nothing left to run.
- `tracking`: a user's dataset, tracked by DVC.
"""
