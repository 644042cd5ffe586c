"""`zerotrain restore`: what a commit's dvc.lock names is back, and nothing is left to do."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.config import read_config
from zerotrain.dvc.jobs import MAIN_CONFIG, in_order, stage_name, workflow_of
from zerotrain.dvc.pipeline import LOCK
from zerotrain.dvc.records import settle
from zerotrain.dvc.storage import bring, open_repo, some
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from dvc.repo import Repo


def restore(*, force: bool = False) -> bool:
    """Bring back data, caches, checkpoints, progress and weights of the commit that lies here.

    Args:
        force: Replace files that lie here and that DVC has not stored.

    Returns:
        Whether both tools then find nothing to do; what they find is printed.

    Raises:
        PipelineError: nothing is recorded, something is missing, or a training runs.
    """
    refuse_running()
    refuse_unrecorded()
    with open_repo() as repo:
        brought = bring(repo, force=force)
        print(f"brought back: {len(brought)} of {_stored(repo)} outputs; the others lay here")
        configs = _configs(repo)
    for config in configs:
        _refuse_missing_data(config)
        settle(config, killed=False)
    with open_repo() as repo:
        made = {out.stage.addressing for out in repo.index.outs if out.hash_info}
        left = {
            f"dvc: {name}": _told(why) if name in made else "never made, says dvc.lock"
            for name, why in repo.status().items()
        }
    for config in configs:
        left |= {f"snakemake: {name}": why for name, why in _to_run(config).items()}
    for name, why in left.items():
        print(f"  {name}: {why}")
    print(
        f"to do: {len(left)} as listed; `snakemake --cores all train` does it"
        if left
        else "nothing to do: `dvc status` is clean, and `snakemake -n train` would run nothing"
    )
    return not left


def refuse_running() -> None:
    """Refuse where a training or Snakemake is at work in this folder.

    Raises:
        PipelineError: naming who runs.
    """
    from zerotrain.training.lock import LOCK as TRAINING
    from zerotrain.training.lock import holder_of

    for path in sorted(Path("results").glob(f"*/*/progress/{TRAINING}")):
        holder = holder_of(path.parent)
        if holder and holder.lives():
            raise PipelineError(
                f"{path.parent}: a training is running here: pid {holder.pid} on {holder.host}",
                hint=f"wait for it, or stop it with `touch {path.parent}/stop`; if that host is "
                f"gone for good, remove {path}",
            )
    if any(Path(".snakemake/locks").glob("*.lock")):
        raise PipelineError(
            ".snakemake/locks: snakemake is running in this folder, or was killed",
            hint="wait for it; where none runs: `snakemake --unlock`",
        )


def refuse_unrecorded() -> None:
    """Refuse where no dvc.lock says what was made.

    Raises:
        PipelineError: there is none, or it is empty.
    """
    if not LOCK.is_file():
        raise PipelineError(
            f"{LOCK}: not in this commit, so nothing is recorded that could be brought back",
            hint="take a commit that has one (`git log --all -- dvc.lock`); or `make train`, then "
            "`git add dvc.lock`, commit, and `dvc push`. `dvc pull` brings tracked data alone",
        )
    if not LOCK.read_text().strip():
        raise PipelineError(
            f"{LOCK}: empty: something was killed while it was written",
            hint=f"`git checkout -- {LOCK}`",
        )


def _stored(repo: Repo) -> int:
    return sum(1 for out in repo.index.outs if out.hash_info and out.use_cache)


def _configs(repo: Repo) -> list[Path]:
    """The configurations whose runs the pipeline holds."""
    found = set()
    for stage in repo.index.stages:
        words = shlex.split(str(getattr(stage, "cmd", None) or ""))
        if words[:1] == ["snakemake"]:
            chosen = "--configfile" in words
            found.add(Path(words[words.index("--configfile") + 1]) if chosen else MAIN_CONFIG)
    return sorted(found)


def _refuse_missing_data(config: Path) -> None:
    data = read_config(config).data
    named = [("data.images", data.images), ("data.metadata", data.metadata)]
    if data.path and (Path(data.path).suffix or data.path.startswith((".", "/", "~"))):
        named.append(("data.path", data.path))
    missing = [(key, name) for key, name in named if name and not Path(name).expanduser().exists()]
    for key, name in missing:
        raise PipelineError(
            f"{config}: {key}: {name} is not here: neither git nor DVC holds it; all else is back",
            hint="put it there and call `zerotrain restore` again; where it lies, `zerotrain data "
            "add` lets DVC hold it from now on",
        )


def _to_run(config: Path) -> dict[str, str]:
    """The stages that Snakemake would run, with its first reason."""
    with workflow_of(config) as workflow:
        dag = workflow.dag
        return {
            stage_name(job): _first(str(dag.reason(job)))
            for job in in_order(dag.jobs)
            if dag.needrun(job)
        }


def _first(reasons: str) -> str:
    kind, _, names = reasons.partition("; ")[0].partition(": ")
    return f"{kind}: {some(names.split(', '))}" if names else kind


def _told(why: Iterable[Any]) -> str:
    """What `dvc status` says of a stage, on one line."""
    said = []
    for one in why:
        if isinstance(one, Mapping):
            for kind, paths in one.items():
                named = [f"{path} {state}" for path, state in _flat(paths)]
                said.append(f"{kind}: {some(named)}" if named else str(kind))
        else:
            said.append(str(one))
    return "; ".join(said)


def _flat(paths: Any) -> list[tuple[str, Any]]:
    if not isinstance(paths, Mapping):
        return []
    return [
        pair
        for key, value in paths.items()
        for pair in (_flat(value) if isinstance(value, Mapping) else [(str(key), value)])
    ]
