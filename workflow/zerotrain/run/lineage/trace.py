"""`zerotrain trace`: from weights, or a copied file of them, to everything they were made from; and
with --image from an image to the weights that it went into.

A cache lists its images, so an image is found in weights with an unchanged cache even if the
dataset has changed since."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from zerotrain.artifact import MANIFEST, Artifact, file_sha256
from zerotrain.artifact.columns import Columns
from zerotrain.artifact.layout import RESULTS
from zerotrain.cache.layout import Entry, read_index
from zerotrain.data.dataset import IMAGES, Sample
from zerotrain.data.dataset_folder import read_samples
from zerotrain.errors import PipelineError
from zerotrain.run.lineage.chain import (
    SHORT,
    ArtifactIndex,
    Files,
    Node,
    UnreadableError,
    Walk,
    enclosing,
    load,
    project_of,
)
from zerotrain.run.lineage.report import FORMAT, quoted
from zerotrain.run.lineage.walk import Walker


def trace(weights: Path) -> Walk:
    """Walk from weights to everything they were made from, and verify it.

    Args:
        weights: A published folder, or a file in one; for a copied file the folder under results/
            that lists its hash.

    Raises:
        PipelineError: the path does not exist, or no folder lists the file.
    """
    place = weights.expanduser().absolute()
    if not os.path.exists(place):
        raise PipelineError(
            f"{weights}: no such file or folder", hint="name a folder of weights, or a file in one"
        )
    files = Files()
    # A link may point into a project from outside, or out of it to another disk.
    folder = enclosing(place) or enclosing(place.resolve())
    if folder is None and place.is_dir():
        _check_no_folders_inside(weights)
        # Its manifest is missing: its place tells where its parents may be.
        return Walker(ArtifactIndex(project_of(place, {})), files).walk(place)
    folder = folder or _listing(place, files)
    if folder is None:
        raise PipelineError(
            f"{weights}: not in a published folder, and none under {RESULTS}/ lists its hash",
            hint=f"name the weights of a phase; {RESULTS}/ is that of the working directory",
        )
    try:
        root = project_of(folder, load(folder).parents)
    except UnreadableError:
        root = project_of(folder, {})
    return Walker(ArtifactIndex(root), files).walk(folder)


def _check_no_folders_inside(folder: Path) -> None:
    """Check that a folder is no run, phase or progress folder, which have no manifest."""
    inside = sorted(found.parent for found in folder.glob(f"*/{MANIFEST}"))
    inside += sorted(found.parent for found in folder.glob(f"*/weights/{MANIFEST}"))
    if inside:
        named = [found for found in inside if found.name == "weights"] or inside
        raise PipelineError(
            f"{folder}: is no published folder, but holds some",
            hint=f"zerotrain trace {named[-1]}",
        )


def _listing(file: Path, files: Files) -> Path | None:
    """Find the folder under results/ that lists a file's hash; prefer weights."""
    sha256, bytes = files.sha256(file), file.stat().st_size
    listing = [
        found
        for found in ArtifactIndex(Path.cwd()).published
        if any((one["sha256"], one["bytes"]) == (sha256, bytes) for one in found.files.values())
    ]
    listing.sort(key=lambda found: found.kind not in ("weights", "exported"))
    return listing[0].folder if listing else None


KINDS = ("weights", "exported")
IMAGES_OF_ENTRY = ("image_sha256", "conditioning_sha256")
"""Fields of a cache's entry with the digests of its images."""
Seen = dict[str, str]
"""Split by name within the source, for the samples that contain the image."""


@dataclass(frozen=True)
class Phase:
    """A phase that trained on a dataset."""

    path: str
    """The phase's checkpoint."""
    name: str
    preset: str
    first_step: int
    """The step at which it started."""
    last_step: int
    epochs: float | None
    """How often it saw each sample of the training split; None if unknown."""
    samples: Seen


@dataclass(frozen=True)
class Use:
    """Weights, and the phases before them whose data had the image, in order."""

    weights: str
    kind: str
    phases: list[Phase]

    @property
    def trained(self) -> bool:
        """Return whether the image was trained on, rather than only held out."""
        return any("train" in phase.samples.values() for phase in self.phases)


@dataclass
class Uses:
    """The weights that an image went into."""

    image: str
    sha256: str
    datasets: dict[str, Seen] = field(default_factory=dict)
    """Its samples, by the dataset's path."""
    weights: list[Use] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)
    """Weights with an incomplete lineage, and folders with an unreadable manifest, which may be
    weights."""

    @property
    def known(self) -> bool:
        """Return whether any dataset has the image, or had it when a cache was made."""
        return bool(self.datasets or self.weights)


def uses_of(image: Path) -> Uses:
    """Find an image by its content among the datasets, and all weights made from them.

    Raises:
        PipelineError: the file is unreadable, or there is no results folder here.
    """
    try:
        sha256 = file_sha256(image.expanduser())
    except OSError as error:
        raise PipelineError(
            f"--image: {image}: {error.strerror}", hint="name the file of an image"
        ) from error
    index = ArtifactIndex(Path.cwd())
    if not (index.root / RESULTS).is_dir():
        raise PipelineError(
            f"--image: no {RESULTS}/ in {index.root}, whose weights could be asked",
            hint="call it in the project",
        )
    found = Uses(str(image), sha256)
    for one in index.published:
        if one.kind == "dataset" and (seen := _seen_in_dataset(one, sha256)):
            found.datasets[index.display(one.folder)] = seen
    walker = Walker(index)
    for one in index.published:
        if one.kind not in KINDS:
            continue
        walk = walker.walk(one.folder)
        checkpoints = [node for node in walk.nodes if node.kind == "checkpoint"]
        known = [_samples_of(node, sha256) for node in checkpoints]
        path = index.display(one.folder)
        pairs = [(node, seen) for node, seen in zip(checkpoints, known, strict=True) if seen]
        phases = [_phase(node, seen) for node, seen in reversed(pairs) if seen]
        if phases:
            found.weights.append(Use(path, one.kind, phases))
        elif None in known or _is_cut(walk):
            found.untold.append(path)
    found.untold += [index.display(folder) for folder in index.unreadable]
    return found


def text(uses: Uses) -> str:
    """Format as text: a line for each dataset and for each phase of each weights folder."""
    what = f"{uses.image} (sha256 {uses.sha256[:SHORT]})"
    if not uses.known:
        return f"{what}: no dataset under {RESULTS}/ knows this image\n{_untold(uses)}"
    lines = [f"{what} is"]
    lines += [f"  {path}: {_split(seen)}" for path, seen in uses.datasets.items()]
    if not uses.datasets:
        lines.append("  in no dataset any more; caches still have it")
    for use in uses.weights:
        held_out = "" if use.trained else "  only held out: no step was taken on it"
        lines.append(f"{use.weights}{held_out}")
        lines += [f"  {_phase_line(phase)}" for phase in use.phases]
    trained = sum(use.trained for use in uses.weights)
    summary = f"{trained} of {len(uses.weights)} weights that know it were trained on it"
    lines.append(summary if uses.weights else f"no weights under {RESULTS}/ know it")
    return "\n".join(lines) + "\n" + _untold(uses)


def document(uses: Uses) -> str:
    """Format as JSON with stable keys."""
    found: dict[str, Any] = {"format": FORMAT, **asdict(uses), "known": uses.known}
    for entry, use in zip(found["weights"], uses.weights, strict=True):
        entry["trained"] = use.trained
    return json.dumps(found, indent=1) + "\n"


def flowchart(uses: Uses) -> str:
    """Format as a Mermaid flowchart."""
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


def _samples_of(checkpoint: Node, sha256: str) -> Seen | None:
    """Return the samples of a phase that contain the image; None if its samples are unknown."""
    cache = next((link for link in checkpoint.links if link.name == "cache"), None)
    if cache is None:
        return None
    made = cache.node.artifact
    if made and cache.identity in (None, made.identity):
        if "modality" in made.content:
            return {}  # text
        try:
            entries = read_index(made.folder).entries
            return _seen_in(Columns.of(Entry, entries), IMAGES_OF_ENTRY, sha256)
        except (OSError, ValueError):
            pass
        link = next((link for link in cache.node.links if link.name == "dataset"), None)
        if link and (dataset := link.node.artifact) and link.identity in (None, dataset.identity):
            return _seen_in_dataset(dataset, sha256)
    return None


def _seen_in_dataset(dataset: Artifact, sha256: str) -> Seen:
    try:
        samples = read_samples(dataset, IMAGES)
    except PipelineError:  # of text, or damaged
        return {}
    return _seen_in(samples, ("image_sha256", "conditioning.image_sha256"), sha256)


def _seen_in(entries: Columns[Entry] | Columns[Sample], names: Sequence[str], sha256: str) -> Seen:
    places = (entries.places(name, sha256) for name in names)
    alike = (entries[int(place)] for place in sorted({*chain.from_iterable(places)}))
    return {one.file: one.split for one in alike}


def _phase(checkpoint: Node, seen: Seen) -> Phase:
    launch, start = checkpoint.parent("launch"), checkpoint.parent("start")
    meant = launch.facts if launch else {}
    # The launch files replace a missing checkpoint.
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
    reason = "unknown, because a link is gone or unreadable (zerotrain trace names it)"
    return f"{reason}: {', '.join(uses.untold)}\n"
