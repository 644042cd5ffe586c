"""`zerotrain restore`: restore all outputs of a commit's dvc.lock, and leave nothing to run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.artifact.documents import read_text
from zerotrain.artifact.layout import RESULTS, ROLLING
from zerotrain.config.suggestions import join_first
from zerotrain.errors import PipelineError
from zerotrain.pipeline import snakemake_runs
from zerotrain.pipeline.dvc.files import LOCK, parse_lock
from zerotrain.pipeline.dvc.jobs import config_of, in_order, stage_name, workflow_of
from zerotrain.pipeline.dvc.records import write_snakemake_metadata
from zerotrain.pipeline.dvc.storage import bring, check_dvc_is_set_up, open_repo
from zerotrain.pipeline.snakemake import config_option

if TYPE_CHECKING:
    from dvc.repo import Repo


def restore(*, force: bool = False) -> bool:
    """Restore data, caches, checkpoints, progress and weights of the commit that is checked out.

    Args:
        force: Whether to replace files here that DVC has not stored.

    Returns:
        Whether both tools find nothing left to run; the rest is printed.

    Raises:
        PipelineError: nothing is recorded, something is missing, or a training is running.
    """
    check_dvc_is_set_up()
    check_nothing_runs()
    check_recorded()
    with open_repo() as repo:
        brought, stored = len(bring(repo, force=force)), _stored(repo)
        others = "; the others were here" if brought < stored else ""
        print(f"brought back: {brought} of {stored} outputs{others}")
        _check_no_missing_inputs(repo)
        configs = _configs(repo)
    for config in configs:
        write_snakemake_metadata(config, killed=False)
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
        f"to do: {len(left)} as listed; {_commands('--cores all train', configs)} does it"
        if left
        else f"nothing to do: `dvc status` is clean, and {_commands('-n train', configs)} would "
        "run nothing"
    )
    return not left


def check_nothing_runs() -> None:
    """Check that no training and no Snakemake is running in this folder.

    Raises:
        PipelineError: something is running; the message names it.
    """
    from zerotrain.training.process.lock import LOCK as TRAINING
    from zerotrain.training.process.lock import describe, is_alive, read_owner, unlock_hint

    for path in sorted(RESULTS.glob(f"*/*/{ROLLING}/{TRAINING}")):
        owner = read_owner(path.parent)
        if owner and is_alive(path.parent, owner):
            raise PipelineError(
                f"{path.parent}: a training is running here: {describe(path.parent, owner)}",
                hint=f"wait for it, or stop it with `touch {path.parent}/stop`"
                + unlock_hint(path.parent, owner),
            )
    if any(snakemake_runs.LOCKS.glob("*.lock")):
        snakemake_runs.remove_stale_lock()
    if any(snakemake_runs.LOCKS.glob("*.lock")):
        raise PipelineError(
            ".snakemake/locks: snakemake is running in this folder, or was killed",
            hint="wait for it; where none runs: `snakemake --unlock`",
        )


def check_recorded() -> None:
    """Check that dvc.lock records outputs.

    Raises:
        PipelineError: it is missing or empty, contains conflict markers, or is damaged.
    """
    if not LOCK.is_file():
        raise PipelineError(
            f"{LOCK}: not here, so nothing is recorded that could be brought back",
            hint=f"`git checkout -- {LOCK}`, or take a commit that has one (`git log --all -- "
            f"{LOCK}`); else `make train`, `git add {LOCK}`, commit, `dvc push`. `dvc pull` brings "
            "tracked data alone",
        )
    text = read_text(LOCK, follow_links=True)
    if "\n<<<<<<< " in text:
        raise PipelineError(
            f"{LOCK}: a merge has left its marks in it",
            hint=f"take one side, `git checkout --ours -- {LOCK}` or `--theirs`, and call it again",
        )
    if not text.strip():
        raise PipelineError(
            f"{LOCK}: empty: something was killed while it was written",
            hint=f"`git checkout -- {LOCK}`",
        )
    parse_lock(text)


def _stored(repo: Repo) -> int:
    return sum(1 for out in repo.index.outs if out.hash_info and out.use_cache)


def _configs(repo: Repo) -> list[Path]:
    """List the configurations of the pipeline's runs."""
    commands = (str(getattr(stage, "cmd", None) or "") for stage in repo.index.stages)
    return sorted({config for config in map(config_of, commands) if config})


def _check_no_missing_inputs(repo: Repo) -> None:
    """Check that each file that no stage makes is here: without it nothing can be checked."""
    made = {Path(out.fs_path) for out in repo.index.outs}
    for stage in repo.index.stages:
        for dep in stage.deps:
            place = Path(dep.fs_path)
            if dep.exists or made & {place, *place.parents}:
                continue
            raise PipelineError(
                f"{dep}: not here, and DVC does not hold it; {stage.addressing} takes it in. All "
                "else is back",
                hint=f"where git holds it: `git checkout -- {dep}`. Else put it there and call "
                "`zerotrain restore` again; where it is, `zerotrain data add` lets DVC hold it "
                "from now on. If no run takes it in any more: `zerotrain dvc generate`",
            )


def _commands(words: str, configs: Iterable[Path]) -> str:
    """Format calls of Snakemake, one per configuration."""
    return " and ".join(
        f"`{' '.join([f'snakemake {words}', *config_option(one)])}`" for one in configs
    )


def _to_run(config: Path) -> dict[str, str]:
    """Return the stages that Snakemake would run, each with its first reason."""
    with workflow_of(config) as workflow:
        dag = workflow.dag
        return {
            stage_name(job): _first(str(dag.reason(job)))
            for job in in_order(dag.jobs)
            if dag.needrun(job)
        }


def _first(reasons: str) -> str:
    kind, _, names = reasons.partition("; ")[0].partition(": ")
    return f"{kind}: {join_first(names.split(', '), 3)}" if names else kind


def _told(why: Iterable[Any]) -> str:
    """Format what `dvc status` reports about a stage on one line."""
    parts = []
    for one in why:
        if isinstance(one, Mapping):
            for kind, paths in one.items():
                named = [f"{path} {state}" for path, state in _flat(paths)]
                parts.append(f"{kind}: {join_first(named, 3)}" if named else str(kind))
        else:
            parts.append(str(one))
    return "; ".join(parts)


def _flat(paths: Any) -> list[tuple[str, Any]]:
    if not isinstance(paths, Mapping):
        return []
    return [
        pair
        for key, value in paths.items()
        for pair in (_flat(value) if isinstance(value, Mapping) else [(str(key), value)])
    ]
