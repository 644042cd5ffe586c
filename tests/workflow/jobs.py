"""How often each rule runs, edits of the source, and what a refused command prints."""

from __future__ import annotations

from collections.abc import Callable

from zerotrain.artifact.stage_versions import VERSIONS
from zerotrain.errors import EXIT_USER_ERROR

EVERYTHING = {
    "prepare_dataset": 1,
    "build_base": 1,
    "cache_latents": 1,
    "render_launch": 2,
    "train_phase": 2,
    "export_weights": 2,
    "evaluate": 2,
    "report": 1,
}
NOTHING: dict[str, int] = {}
EVALUATIONS = {"evaluate": 2, "report": 1}
FROM_LAUNCH = {
    name: EVERYTHING[name]
    for name in ("render_launch", "train_phase", "export_weights", "evaluate", "report")
}
ONE_PHASE = dict.fromkeys(FROM_LAUNCH, 1)
CONFIG = "config/config.yaml"


def without_zeros(jobs):
    """Jobs that run at least once."""
    return {name: count for name, count in jobs.items() if count}


def raised(stage: str) -> Callable:
    """Raise the version of a stage."""
    path = "workflow/zerotrain/artifact/stage_versions.py"
    return replace(path, f'"{stage}": {VERSIONS[stage]}', f'"{stage}": {VERSIONS[stage] + 1}')


def source(module: str) -> Callable:
    """An edit of a source file that changes what it does."""
    return lambda project: project.append(f"workflow/zerotrain/{module}", "\nEDITED = 1\n")


def replace(name: str, old: str, new: str) -> Callable:
    """An edit of a file."""
    return lambda project: project.edit(name, old, new)


def config(old: str, new: str) -> Callable:
    """An edit of the configuration."""
    return replace(CONFIG, old, new)


def rewrite(name: str, text: str) -> Callable:
    """New content for a file, there or not."""
    return lambda project: (project.folder / name).write_text(text)


def both(first: Callable, second: Callable) -> Callable:
    """Two edits."""
    return lambda project: (first(project), second(project))


def remove(name: str) -> Callable:
    """A file is gone."""
    return lambda project: (project.folder / name).unlink()


def refused(done) -> str:
    """What a refused command printed, held to one ERROR with its hint."""
    assert done.returncode == EXIT_USER_ERROR, done.stdout
    assert "Traceback" not in done.stdout
    assert done.stdout.count("ERROR: ") == 1
    assert done.stdout.count("Hint: ") == 1
    return done.stdout
