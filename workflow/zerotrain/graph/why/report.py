"""`zerotrain why`: what runs, why, and what follows, as text or as JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from zerotrain.artifact.layout import RESULTS, runs_here
from zerotrain.config import MAIN_CONFIG
from zerotrain.config.runs import find_config
from zerotrain.errors import PipelineError
from zerotrain.graph.checks import read_checked_runs
from zerotrain.graph.currency import Currency
from zerotrain.graph.reruns import Reruns, plan
from zerotrain.graph.why.causes import Causes, find_causes
from zerotrain.graph.why.outcomes import Outcome, Outcomes
from zerotrain.graph.why.samples import count, name_some
from zerotrain.importers import enable_launch_files
from zerotrain.machine.disk import size
from zerotrain.run.runs import find_place, is_config
from zerotrain.training.reporting.display import format_duration

SHOWN_BYTES = 100_000
NOTHING = "nothing would run: everything is made from what is there now"


def split_words(words: Sequence[str]) -> tuple[Path, str | None]:
    """Return the configuration and the target that the words after `zerotrain why` name.

    A target of results/RUN, and RUN/PHASE, name the run themselves; any other without a run is of
    the default configuration.

    Raises:
        PipelineError: no file has the run, or there are more words.
    """
    if len(words) > 2:
        raise PipelineError(
            f"why: {' '.join(words)}: more than a run and a target",
            hint="zerotrain why RUN TARGET; both may be left out",
        )
    if len(words) == 2:
        return find_config(words[0]), words[1]
    if not words:
        return MAIN_CONFIG, None
    (word,) = words
    if is_config(word):
        return find_config(word), None
    place = find_place(word)
    if place is not None and place.is_here and place.run in runs_here().values():
        return find_config(place.run), word if place.parts else None
    return MAIN_CONFIG, word


def why(config: Path, target: str | None, *, as_json: bool = False) -> str:
    """Explain what would run.

    Args:
        config: The run's configuration, or a sweep's.
        target: A rule, a stage, a file or folder of the results, or a phase; None: everything.
        as_json: Whether to answer with JSON.

    Raises:
        PipelineError: the configuration is wrong, or there is no such target.
    """
    enable_launch_files()
    reruns = plan(read_checked_runs(config), [target or "train"])
    nothing_made = len(reruns.running) == len(reruns.needed)
    causes = find_causes(reruns.running, nothing_made=nothing_made)
    return (document if as_json else text)(reruns, causes, Outcomes(reruns, causes))


def text(reruns: Reruns, causes: Causes, outcomes: Outcomes) -> str:
    """Return the causes, each with the jobs that follow from it, and what they cost together."""
    if not reruns.running:
        return NOTHING + "\n"
    lines: list[str] = []
    shown: set[Currency] = set()
    for cause in causes.every:
        lines.append(cause.text)
        following = reruns.following(cause.having)
        new = [one for one in following if one not in shown]
        lines += [f"  {_describe(outcomes.of(one))}" for one in new]
        if again := len(following) - len(new):
            lines.append(f"  and {count(again, 'stage')} named above")
        shown.update(new)
    return "\n".join([*lines, *_totals([*outcomes])]) + "\n"


def document(reruns: Reruns, causes: Causes, outcomes: Outcomes) -> str:
    """Return the same as one JSON object. Unknown seconds and bytes are null."""
    every = [*outcomes]
    found = {
        "causes": [
            {
                "kind": cause.kind,
                "text": cause.text,
                "stages": [one.planned.name for one in reruns.following(cause.having)],
            }
            for cause in causes.every
        ],
        "stages": [
            {
                "stage": one.name,
                "rule": one.made.planned.rule,
                "what": one.what,
                "seconds": one.seconds,
                "forecast": one.forecast,
                "bytes": one.bytes,
                "encodes": asdict(one.encodes) if one.encodes else None,
            }
            for one in every
        ],
        "samples": {
            str(dataset.planned.folders[0]): {
                kind: getattr(changes, kind)
                for kind in ("images", "captions", "added", "removed", "renamed")
            }
            | {"unusable": [asdict(one) for one in changes.unusable]}
            for dataset, changes in causes.samples.items()
        },
        "seconds": sum(one.seconds or 0 for one in every),
        "bytes": sum(one.bytes or 0 for one in every),
        "unknown_seconds": [one.name for one in every if one.seconds is None],
        "unknown_bytes": [one.name for one in every if one.bytes is None],
        "free_bytes": _free(),
    }
    return json.dumps(found, indent=1) + "\n"


def _describe(outcome: Outcome) -> str:
    parts = [outcome.what] if outcome.what else []
    if outcome.seconds is None:
        parts.append("time unknown")
    elif outcome.seconds >= 0.5:
        forecast = " by the planner's forecast" if outcome.forecast else ""
        parts.append(f"about {format_duration(outcome.seconds + 0.5)}{forecast}")
    return outcome.name + (f": {', '.join(parts)}" if parts else "")


def _totals(outcomes: list[Outcome]) -> list[str]:
    """Say how many stages there are, how long they take and what they write."""
    stages = f"{count(len(outcomes), 'stage')} would run"
    seconds = [one.seconds for one in outcomes if one.seconds is not None]
    unknown = len(outcomes) - len(seconds)
    if not seconds:
        time = "in an unknown time: no earlier stage tells it"
    else:
        time = f"in about {format_duration(sum(seconds) + 0.5)}, as earlier ones took"
        if any(one.forecast for one in outcomes):
            time = time.replace("as earlier ones took", "as earlier ones took or are forecast")
        time += f", and {count(unknown, 'stage')} of unknown time" if unknown else ""
    known = sum(one.bytes or 0 for one in outcomes)
    unsized = [one.name for one in outcomes if one.bytes is None]
    disk = f"about {size(known)}" if known >= SHOWN_BYTES else "less than 0.1 MB"
    if unsized:
        others = f"what {name_some(unsized)} write{'s' * (len(unsized) == 1)}, of unknown size"
        disk = f"{disk} and {others}" if known >= SHOWN_BYTES else others
    return [f"{stages} {time}", f"on disk: {disk}; {size(_free())} are free"]


def _free() -> int:
    """Return the free bytes of the disk with the results."""
    return shutil.disk_usage(RESULTS if RESULTS.is_dir() else Path()).free
