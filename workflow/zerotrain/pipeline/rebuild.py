"""Plans of jobs for damaged folders, which Snakemake misses: it checks only their manifest.json.

After Snakemake has planned, the files that the manifests of its graph list are checked: presence
and size by one stat each; a file that is newer than its manifest is hashed, unless its hash is
stored. The job of a damaged folder is added to the plan, but not the jobs that depend on it: the
folder is made again from the same inputs, so it has the same content. If it has not, the next plan
finds a changed manifest.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from zerotrain.artifact import MANIFEST, file_sha256, is_published, verdicts
from zerotrain.artifact.damage import Damage, compare_hash, compare_size
from zerotrain.artifact.documents import DocumentError, read_object, read_text
from zerotrain.artifact.manifest import find_manifest_error
from zerotrain.errors import PipelineError
from zerotrain.pipeline.dvc import jobs as graph_jobs
from zerotrain.pipeline.kept_jobs import LONG_AGO

DATASET = "prepare_dataset"
"""The rule whose folder has others inside, its caches, and stays in its place."""
TRAINING = "train_phase"
MEASURING = "evaluate"
"""The rule whose outputs differ each time: they contain seconds and bytes."""
CACHE = "cache_latents"
"""The rule that keeps the intact files of its folder."""
TRAINED_AGAIN = "TRAINED AGAIN"
SHOWN = 3
"""Damaged files that are named per folder."""


async def add_damaged_folders(dag: Any) -> None:
    """Add the jobs of damaged folders to Snakemake's plan."""
    allowed = dag.rules_allowed_for_needrun
    planned = [
        job
        for job in dag.jobs
        if not dag.needrun(job) and (not allowed or job.rule.name in allowed)
    ]
    damaged = find_damaged(planned)
    for job, folders in damaged.items():
        for folder, damage in folders.items():
            files = [f"{one.path} (damaged)" if one.differs else str(one.path) for one in damage]
            dag.reason(job).missing_output.update(files)
            if not graph_jobs.LOOKING:
                print(describe(job.rule.name, folder, damage), file=sys.stderr)
    waiting = deque(damaged)
    while waiting:
        job = waiting.popleft()
        if dag.needrun(job):
            continue
        dag._needrun.add(job)
        for needed, files in dag.dependencies[job].items():
            if missing := [file async for file in needed.missing_output(files)]:
                dag.reason(needed).missing_output.update(missing)
                waiting.append(needed)
        if job not in damaged or job.rule.name == MEASURING:
            # The job's new output may differ.
            for depending, files in dag.depending[job].items():
                dag.reason(depending).updated_input_run.update(files)
                waiting.append(depending)


def set_aside_damaged(workflow: Any) -> None:
    """Keep damaged files that the planned jobs will replace; called before the first job."""
    if not workflow.is_main_process or workflow.touch:
        return
    # Check again: another process may have made them before this one got Snakemake's lock.
    damaged = find_damaged(list(workflow.dag.needrun_jobs()))
    for job, folders in damaged.items():
        for folder, damage in folders.items():
            check_not_stored(folder, damage, job.rule.name)
    for job, folders in damaged.items():
        # A job makes all of its folders again, including intact ones.
        for folder in {Path(output).parent for output in job.output}:
            damage = folders.get(folder, [])
            if kept := set_aside(folder, damage, job.rule.name):
                print(f"{folder}: what would be replaced is kept as {kept}", file=sys.stderr)


def find_damaged(jobs: list[Any]) -> dict[Any, dict[Path, list[Damage]]]:
    """Find the damaged folders among the outputs of Snakemake's jobs."""
    known = verdicts.load()
    folders = [
        (job, Path(output).parent)
        for job in jobs
        for output in job.output
        if os.path.basename(output) == MANIFEST
    ]
    found: dict[Any, dict[Path, list[Damage]]] = {}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        damages = pool.map(lambda one: look_at(one[1], known), folders)
        for (job, folder), damage in zip(folders, damages, strict=True):
            if damage:
                found.setdefault(job, {})[folder] = damage
    return found


def look_at(folder: Path, known: verdicts.Verdicts) -> list[Damage]:
    """Compare a folder's files with its manifest, cheaply enough for a plan of many runs.

    Args:
        folder: The folder; without a manifest it counts as missing, not damaged.
        known: The stored hashes.
    """
    path = folder / MANIFEST
    try:
        stat = path.stat()
        # A stale manifest has a reset mtime; use its ctime, as no file was written since then.
        written = stat.st_ctime_ns if stat.st_mtime == LONG_AGO[1] else stat.st_mtime_ns
        found = read_object(path)
        wrong = find_manifest_error(found)
    except FileNotFoundError:
        return []
    except OSError as error:
        _say_unread(Damage(path, f"cannot be read ({error.strerror})", differs=False))
        return []
    except DocumentError as error:
        wrong = f"cannot be read ({error.why})"
    if wrong:  # its names cannot be trusted: one could lead out of the folder
        return [Damage(path, wrong, differs=True)]
    files = found["files"]
    looked = (_look_at(folder / name, files[name], written, known) for name in files)
    damage = [one for one in looked if one]
    for one in damage:
        if one.unread:
            _say_unread(one)
    return [one for one in damage if not one.unread]


def _look_at(
    path: Path, entry: dict[str, Any], written: int, known: verdicts.Verdicts
) -> Damage | None:
    stat, damage = compare_size(path, entry)
    if stat is None or damage:
        return damage
    remembered = known.get(verdicts.key_of(stat))
    if remembered is None and stat.st_mtime_ns <= written:
        return None
    if remembered is None:
        return compare_hash(path, entry, verdicts.remembering(file_sha256))
    return compare_hash(path, entry, lambda path: remembered)


def _say_unread(damage: Damage) -> None:
    """Report that a file was not checked: a failing disk or connection is not damage yet."""
    print(f"{damage}: it is left as it is", file=sys.stderr)


def describe(rule: str, folder: Path, damage: list[Damage]) -> str:
    """Describe the damaged files of a folder, and the cost of making it again."""
    named = "; ".join(map(str, damage[:SHOWN]))
    more = f"; and {len(damage) - SHOWN} more" if len(damage) > SHOWN else ""
    cost = describe_training(folder) if rule == TRAINING else f"{rule} makes {folder} again"
    return f"{named}{more}: {cost}"


def describe_training(checkpoint: Path) -> str:
    """Describe whether a damaged checkpoint is published again, or the phase trained again."""
    from zerotrain.training.checkpointing.progress_folder import saved_steps, step_folder

    progress, known = checkpoint.parent / "progress", verdicts.load()
    try:
        end = int(read_object(checkpoint / "checkpoint.json")["step"])
    except (OSError, ValueError, KeyError, TypeError):
        end = None
    steps = [step for step in saved_steps(progress) if end is None or step <= end]
    whole = [step for step in steps if not look_at(step_folder(progress, step), known)]
    if steps and not whole:
        return (
            f"{progress} holds no whole checkpoint either, so {TRAINING} will refuse; restore one "
            "of them from a copy"
        )
    if whole and end in (None, whole[-1]):
        return f"{TRAINING} publishes {step_folder(progress, whole[-1])} again, no step is trained"
    since = f"from step {whole[-1]}" if whole else "from its start"
    return (
        f"{progress} does not hold the step of its end any more: the phase is TRAINED AGAIN {since}"
    )


def check_not_stored(folder: Path, damage: list[Damage], rule: str) -> None:
    """Check that no training is repeated whose checkpoint DVC has stored.

    Raises:
        PipelineError: dvc.lock has the checkpoint, and steps would be trained again.
    """
    lock = Path("dvc.lock")
    if rule != TRAINING or TRAINED_AGAIN not in describe_training(folder) or not lock.is_file():
        return
    if f"path: {folder}\n" in read_text(lock, follow_links=True):
        raise PipelineError(
            f"{damage[0]}: {describe_training(folder)}, but dvc.lock has {folder}",
            hint=f"`dvc checkout --force {folder}`, after `dvc fetch` where this machine lacks it; "
            f"to train it again, remove {folder / MANIFEST}",
        )


def set_aside(folder: Path, damage: list[Damage], rule: str) -> Path | None:
    """Move damaged files out of the way of the job that makes them again.

    A checkpoint is kept as a whole, as making it again may take a training; so is a folder with
    files that its manifest does not list, as they are the user's. From a cache only the damaged
    shards are moved: the intact ones are reused. Links are not kept, as they contain no data.

    Returns:
        The new place; None if the job makes everything there again.
    """
    others = [one.path for one in damage if one.differs and not one.path.is_symlink()]
    trained = rule == TRAINING and bool(damage)
    if not folder.is_dir() or rule == DATASET:
        return None
    own = _unlisted(folder) if rule != CACHE else []
    if not (others or own or trained):
        return None
    names = (f"{folder.name}.damaged-{number}" for number in itertools.count(1))
    kept = next(path for path in map(folder.with_name, names) if not path.exists())
    if rule == CACHE:
        for path in others:
            target = kept / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        return kept
    folder.rename(kept)
    if is_published(kept):  # otherwise it would count as one of the run's folders
        (kept / MANIFEST).rename(kept / f"{MANIFEST}.damaged")
    return kept


def _unlisted(folder: Path) -> list[Path]:
    """List the files in a folder that its manifest does not list."""
    try:
        listed = read_object(folder / MANIFEST)["files"]
    except (OSError, ValueError, LookupError, TypeError):
        listed = {}
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return [path for name, path in names.items() if name != MANIFEST and name not in listed]
