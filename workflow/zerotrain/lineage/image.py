"""zerotrain trace --image: the weights that an image went into.

A cache lists the images it holds, so weights whose cache is the one they were trained on tell of an
image even where the dataset has changed since.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerotrain.artifact import Artifact, file_sha256
from zerotrain.cache.layout import INDEX
from zerotrain.errors import PipelineError
from zerotrain.lineage.chain import Link, Node, Walk
from zerotrain.lineage.report import FORMAT, quoted
from zerotrain.lineage.shelf import RESULTS, Shelf
from zerotrain.lineage.verify import SHORT
from zerotrain.lineage.walk import Walker

KINDS = ("weights", "exported")
Seen = dict[str, str]
"""Split by name within the source, of the samples that are the image."""


@dataclass(frozen=True)
class Phase:
    """A phase that trained on a dataset."""

    path: str
    """The phase's checkpoint."""
    name: str
    preset: str
    first_step: int
    """Steps done before it."""
    last_step: int
    epochs: float | None
    """How often it saw each sample of the training half; None where nothing tells."""
    samples: Seen


@dataclass(frozen=True)
class Use:
    """Weights, and the phases that led to them and knew the image, the first one first."""

    weights: str
    kind: str
    phases: list[Phase]

    @property
    def trained(self) -> bool:
        """Whether a step was taken on the image, and it was not only held out."""
        return any("train" in phase.samples.values() for phase in self.phases)


@dataclass
class Uses:
    """What became of one image."""

    image: str
    sha256: str
    datasets: dict[str, Seen] = field(default_factory=dict)
    """Its samples, by the dataset's path."""
    weights: list[Use] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)
    """Weights of which it cannot be told, as a link of their chain is gone; and folders whose
    manifest cannot be read, which may be weights."""

    @property
    def known(self) -> bool:
        """Whether any dataset has it, or had it when a cache was made."""
        return bool(self.datasets or self.weights)


def uses_of(image: Path) -> Uses:
    """Find an image by its content among the datasets, and all weights made from them.

    Raises:
        PipelineError: the file cannot be read.
    """
    try:
        sha256 = file_sha256(image.expanduser())
    except OSError as error:
        raise PipelineError(
            f"--image: {image}: {error.strerror}", hint="name the file of an image"
        ) from error
    shelf = Shelf(Path.cwd())
    if not (shelf.root / RESULTS).is_dir():
        raise PipelineError(
            f"--image: no {RESULTS}/ in {shelf.root}, whose weights could be asked",
            hint="call it in the project",
        )
    found = Uses(str(image), sha256)
    for one in shelf.published:
        if one.kind == "dataset" and (seen := _seen(one.content.get("samples"), sha256)):
            found.datasets[shelf.shown(one.folder)] = seen
    walker = Walker(shelf)
    for one in shelf.published:
        if one.kind not in KINDS:
            continue
        walk = walker.walk(one.folder)
        checkpoints = [node for node in walk.nodes if node.kind == "checkpoint"]
        told = [_samples_of(node, sha256, shelf) for node in checkpoints]
        path = shelf.shown(one.folder)
        pairs = [(node, seen) for node, seen in zip(checkpoints, told, strict=True) if seen]
        phases = [_phase(node, seen) for node, seen in reversed(pairs) if seen]
        if phases:
            found.weights.append(Use(path, one.kind, phases))
        elif None in told or _is_cut(walk):
            found.untold.append(path)
    found.untold += [shelf.shown(folder) for folder in shelf.unreadable]
    return found


def text(uses: Uses) -> str:
    """A line for each dataset and for each phase of each weights folder."""
    what = f"{uses.image} (sha256 {uses.sha256[:SHORT]})"
    if not uses.known:
        return f"{what}: no dataset under {RESULTS}/ knows this image\n{_untold(uses)}"
    lines = [f"{what} is"]
    lines += [f"  {path}: {_split(seen)}" for path, seen in uses.datasets.items()]
    if not uses.datasets:
        lines.append("  in no dataset any more; caches know it still")
    for use in uses.weights:
        said = "" if use.trained else "  only held out: no step was taken on it"
        lines.append(f"{use.weights}{said}")
        lines += [f"  {_phase_line(phase)}" for phase in use.phases]
    trained = sum(use.trained for use in uses.weights)
    told = f"{trained} of {len(uses.weights)} weights that know it were trained on it"
    lines.append(told if uses.weights else f"no weights under {RESULTS}/ know it")
    return "\n".join(lines) + "\n" + _untold(uses)


def document(uses: Uses) -> str:
    """The same as JSON, with keys that stay."""
    found: dict[str, Any] = {"format": FORMAT, **asdict(uses), "known": uses.known}
    for entry, use in zip(found["weights"], uses.weights, strict=True):
        entry["trained"] = use.trained
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def flowchart(uses: Uses) -> str:
    """The same as a flowchart of Mermaid."""
    lines = ["flowchart LR", f'  image["{quoted(uses.image)}<br>{uses.sha256[:SHORT]}"]']
    for number, use in enumerate(uses.weights):
        lines.append(f'  w{number}["{quoted(use.weights)}"]')
        before = "image"
        for place, phase in enumerate(use.phases):
            here = f"w{number}p{place}"
            lines.append(f'  {here}["{quoted(_phase_line(phase))}"]')
            lines.append(f"  {before} --> {here}")
            before = here
        lines.append(f"  {before} --> w{number}")
    return "\n".join(lines) + "\n"


def _samples_of(checkpoint: Node, sha256: str, shelf: Shelf) -> Seen | None:
    """The samples of a phase that are the image; None where nothing tells its samples."""
    cache = next((link for link in checkpoint.links if link.name == "cache"), None)
    if cache is None:
        return None
    made = cache.node.artifact
    if made and cache.identity in (None, made.identity):
        if "modality" in made.content:
            return {}  # of text
        try:
            entries = json.loads((made.folder / INDEX).read_text())["entries"]
            return _seen(entries, sha256)
        except (OSError, ValueError, KeyError, TypeError):
            pass
        link = next((link for link in cache.node.links if link.name == "dataset"), None)
        dataset = _as_said(link, shelf)
        if dataset:
            return _seen(dataset.content.get("samples"), sha256)
    return None


def _as_said(link: Link | None, shelf: Shelf) -> Artifact | None:
    if link is None or link.node.artifact is None:
        return None
    return link.node.artifact if link.identity in (None, link.node.identity) else None


def _seen(samples: Any, sha256: str) -> Seen:
    if not isinstance(samples, list):
        return {}
    alike = (one for one in samples if isinstance(one, dict) and one.get("image_sha256") == sha256)
    return {str(one.get("file")): str(one.get("split")) for one in alike}


def _phase(checkpoint: Node, seen: Seen) -> Phase:
    launch, start = checkpoint.parent("launch"), checkpoint.parent("start")
    meant = launch.facts if launch else {}
    # What a checkpoint that is gone would say, its launch files say as well as they can.
    facts = {"step": meant.get("until_step", 0), "preset": meant.get("preset"), **checkpoint.facts}
    before = {"step": meant.get("start_step", 0), **(start.facts if start else {})}
    drawn = facts.get("samples", 0) - before.get("samples", 0)
    epoch = meant.get("epoch_size")
    return Phase(
        path=checkpoint.path,
        name=str(facts.get("phase") or Path(checkpoint.path).parent.name),
        preset=str(facts["preset"] or "unknown"),
        first_step=int(before["step"]),
        last_step=int(facts["step"]),
        epochs=round(drawn / epoch, 2) if epoch and drawn > 0 else None,
        samples=seen,
    )


def _phase_line(phase: Phase) -> str:
    steps = f"steps {phase.first_step + 1:,} to {phase.last_step:,}"
    epochs = f", {phase.epochs:g} epochs" if phase.epochs is not None else ""
    return f"phase {phase.name} ({phase.preset}): {steps}{epochs}: {_split(phase.samples)}"


def _split(seen: Seen) -> str:
    words = {"train": "in the training half", "holdout": "held out"}
    return ", ".join(f"{file} {words.get(split, split)}" for file, split in seen.items())


def _is_cut(walk: Walk) -> bool:
    return not any(node.kind == "checkpoint" and node.artifact for node in walk.nodes)


def _untold(uses: Uses) -> str:
    if not uses.untold:
        return ""
    said = "not told, as a link is gone or unreadable (zerotrain trace names it)"
    return f"{said}: {', '.join(uses.untold)}\n"
