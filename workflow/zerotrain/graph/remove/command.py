"""`zerotrain remove`: asks, removes, and says what stays."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from zerotrain.artifact.documents import read_text
from zerotrain.artifact.layout import ROLLING, RunFolder
from zerotrain.artifact.leftovers import REMOVED, is_held, without_writers
from zerotrain.config.runs import train_command
from zerotrain.errors import PipelineError
from zerotrain.graph.dvc.files import recorded_below
from zerotrain.graph.remove.plan import Plan, plan_removal
from zerotrain.graph.snakemake import LOCKS
from zerotrain.graph.switch.command import is_switching
from zerotrain.machine.disk import size
from zerotrain.machine.question import confirm
from zerotrain.training.process.lock import LOCK, check_not_locked


def remove(run: str, *, data: bool, yes: bool) -> list[str]:
    """Remove the results of a run that nothing else uses.

    Args:
        run: Its name, its configuration, or its folder.
        data: Whether its dataset and caches go as well, unless others use them.
        yes: Whether to remove them without a question.

    Returns:
        What was removed, and what stays.

    Raises:
        PipelineError: nothing of such a run is here, something of it is in use or behind a link, or
            no one has confirmed; nothing is removed.
    """
    plan = plan_removal(run, data=data)
    check_unused(plan)
    freed, goes, stays = size(plan.freed), [*plan.lines()], [*_stays(plan)]
    if not yes:
        unanswered = PipelineError(
            f"{plan.run}: not removed without confirmation, and no one can answer: "
            + "; ".join(goes),
            hint="if that may go, call this again with --yes",
        )
        context = "\n".join(["removed would be", *_indented(goes), *_listed("it stays", stays)])
        if not confirm(context, f"Remove {freed} of {plan.run}?", unanswered):
            raise PipelineError(f"{plan.run}: nothing was removed", hint="answer y to remove it")
    with contextlib.ExitStack() as held:
        # One lock is of all caches of a dataset, as they are neighbours.
        caches = {path.parent: path for one in plan.removed for path in one.glob("cache/*")}
        for cache in caches.values():
            if not held.enter_context(without_writers(cache)):
                raise _in_use(cache, "a job writes here or next to it")
        check_unused(plan)
        _remove(plan.removed)
    return [f"{plan.run}: removed {freed}", *_indented(goes), *_listed("it stays", stays)]


def check_unused(plan: Plan) -> None:
    """Check that no process works on the run, or reads what would go.

    Raises:
        PipelineError: one does; the message names it.
    """
    folder = RunFolder(plan.run).path
    for path in sorted(folder.glob(f"*/{ROLLING}/{LOCK}")):
        check_not_locked(path.parent)
    if is_switching(plan.run):
        raise _in_use(folder, "`zerotrain switch` works on it")
    places = [folder, *plan.removed]
    for lock in sorted(LOCKS.glob("*.lock")):
        for line in read_text(lock).splitlines():
            if any(Path(line).is_relative_to(place) for place in places):
                raise _in_use(folder, f"snakemake works on {line}, or was killed")
    for published in plan.published:
        if is_held(published):
            raise _in_use(published, "a process reads it")


def _in_use(folder: Path, why: str) -> PipelineError:
    return PipelineError(
        f"{folder}: in use, and nothing is removed: {why}",
        hint="wait for it, or end it; after a kill of snakemake: `snakemake --unlock`",
    )


def _remove(places: Iterable[Path]) -> None:
    """Rename all, which takes a moment, then remove them: nothing counts as there by half."""
    hidden = []
    for place in places:
        if place.is_symlink() or not place.is_dir():
            place.unlink()
            continue
        aside = place
        if not place.name.endswith(REMOVED):
            aside = place.with_name(f".{place.name}{REMOVED}")
            if aside.exists():
                shutil.rmtree(aside)
            place.rename(aside)
        hidden.append(aside)
    for aside in hidden:
        if aside.exists():
            shutil.rmtree(aside)


def _stays(plan: Plan) -> Iterator[str]:
    yield from (f"{place}: {why}" for place, why in plan.kept.items())
    for file in plan.configurations:
        yield f"{file}: `{train_command(file)}` makes the run again"
    try:
        count, stored = recorded_below(plan.removed)
    except PipelineError as error:
        yield f"copies in DVC's cache, if any: {error.what}"
        return
    if count:
        yield (
            f"{size(stored)} of {count} outputs, as dvc.lock lists them: DVC's cache keeps what it "
            "has of them on the disk, and `zerotrain restore` brings that back; docs/remotes.md "
            "says how to free it"
        )


def _listed(heading: str, lines: list[str]) -> list[str]:
    return [heading, *_indented(lines)] if lines else []


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
