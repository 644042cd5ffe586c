"""The stages of a run in dvc.yaml: their inputs and outputs, and their calls of Snakemake."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerotrain.artifact import MANIFEST
from zerotrain.artifact.layout import OF_PHASE, DataFolder, RunFolder
from zerotrain.config.models import Phase
from zerotrain.config.read import load_config
from zerotrain.config.run import RunConfig
from zerotrain.config.runs import config_option
from zerotrain.config.stage_settings import SETTINGS
from zerotrain.data.dataset_folder import SAMPLES
from zerotrain.data.open import source_files, source_roots
from zerotrain.graph.runs import Runs
from zerotrain.models.base_places import local_folders

VERSIONS = "workflow/zerotrain/artifact/stage_versions.py"
"""What DVC reads the versions of stages from."""
PHASES = ("train", "launch", "validation", "phases.*")
PROMPTS = ("validation", "phases.*.validation")
SPREAD = {"phases": PHASES, "validation_prompts": PROMPTS}
"""Keys of the file behind values that are put together from several; a star is every phase up to
the stage's own."""
Stage = dict[str, Any]


def stages_of(run: RunConfig, file: Path, config: Path, runs: Runs) -> Iterator[tuple[Path, Stage]]:
    """Yield the stages of a run, each with the folder that names it, in the order of the graph.

    Args:
        run: The run.
        file: The file that has it.
        config: The file that Snakemake is called with: the same, or one that lists several.
        runs: All runs of `config`.
    """
    given = load_config(file)
    call = _Call(file, config)
    folder, data = RunFolder(run.run), DataFolder(run.data_name)
    dataset, own_base = data.path / MANIFEST, folder.base / MANIFEST
    shared_base = Path(runs.base_of_data(run.data_name))
    samples = (data.path / SAMPLES).parent
    yield (
        data.path,
        call([dataset], _sources(run), ["data"], ["prepare_dataset"], [dataset, samples]),
    )

    for manifest in dict.fromkeys((own_base, shared_base)):
        deps = [] if run.is_preset else [*local_folders(run.base), *_file(run.base)]
        # A base of links is not stored: DVC would make the user's own files read-only.
        links = not run.is_preset and run.base_copy == "link"
        out = manifest if links else manifest.parent
        keys = _keys(given, "build_base")
        yield (
            manifest.parent,
            call([manifest], deps, keys, ["build_base"], [out], stored=not links),
        )

    for size in dict.fromkeys(map(run.cache_size, run.phases)):
        cache = data.cache(size)
        prompts = [one[1] for one in run.validation_prompts if not isinstance(one, str)]
        deps = [dataset, shared_base, *_paths(prompts)]
        keys = _keys(given, "cache_latents", len(run.phases))
        yield cache, call([cache / MANIFEST], deps, keys, ["cache_latents"], [cache])

    before = None
    if resume := run.resume_from_checkpoint:
        before = folder.imported_state
        deps = [Path(resume.folder), own_base, *_file(resume.names or "")]
        keys = _keys(given, "import_checkpoint")
        yield before.parent, call([before / MANIFEST], deps, keys, ["import_checkpoint"], [before])

    for number, phase in enumerate(run.phases, 1):
        place = folder.phase(phase.name)
        cache = data.cache(run.cache_size(phase))
        deps = [dataset, cache / MANIFEST, own_base, *([before / MANIFEST] if before else [])]
        deps += [_launch_file(phase), *_paths(run.evaluate.conditioning_images or [])]
        rules = ("render_launch", "export_weights", "evaluate")
        keys = sorted({key for rule in rules for key in _keys(given, rule, number)})
        outs, metrics = [place.path / name for name in OF_PHASE], place.path / "metrics.json"
        targets = [*(out / MANIFEST for out in outs), metrics]
        versions = ["render_launch", "evaluate"]
        yield place.path, call(targets, deps, keys, versions, outs, metrics=[metrics])
        before = place.state

    # It takes the whole file and makes all of the run: so DVC does not miss a key, a section or a
    # phase that has no stage yet.
    deps = [folder.phase(phase.name).evaluation / MANIFEST for phase in run.phases]
    targets = [folder.report / MANIFEST] if runs.are_several else [Path("train")]
    yield folder.report, call(targets, deps, None, ["report"], [folder.report])


class _Call:
    """Builds stages that call Snakemake.

    Args:
        file: The file of the run.
        config: The file that Snakemake is called with.
    """

    def __init__(self, file: Path, config: Path) -> None:
        self._file, self._option = str(file), config_option(config)

    def __call__(
        self,
        targets: Iterable[Path],
        deps: Iterable[Path],
        keys: list[str] | None,
        versions: Iterable[str],
        outs: Iterable[Path],
        *,
        metrics: Iterable[Path] = (),
        stored: bool = True,
    ) -> Stage:
        """Return a stage.

        Args:
            targets: What Snakemake is asked for.
            deps: Files and folders that the stage is made from.
            keys: Keys of the file that it reads; None: all.
            versions: Stages of the package whose versions it depends on.
            outs: Its files and folders.
            metrics: Its metrics.
            stored: Whether DVC keeps its outputs in the cache.
        """
        words = ["snakemake", "--cores", "all", *map(str, targets), *self._option]
        stage: Stage = {"cmd": shlex.join(words)}
        if found := list(dict.fromkeys(map(_relative, deps))):
            stage["deps"] = found
        stage["params"] = [{self._file: keys}, {VERSIONS: [f"VERSIONS.{one}" for one in versions]}]
        kept = {"persist": True} if stored else {"persist": True, "cache": False}
        stage["outs"] = [{str(out): kept.copy()} for out in outs]
        if listed := [{str(path): kept.copy()} for path in metrics]:
            stage["metrics"] = listed
        return stage


def _sources(run: RunConfig) -> list[Path]:
    """List what a dataset is made from: folders as a whole, so that DVC notices a new file."""
    if run.data.has_image_files:
        names = source_roots(run.data)
    elif run.data.path and not run.data.is_on_hub:
        names = [run.data.path]
    else:
        names = source_files(run.data)
    return [Path(name) for name in names]


def _launch_file(phase: Phase) -> Path:
    """Return the preset of a phase; for `auto`, which chooses among all, their folder."""
    folder, preset = Path("config/launch"), phase.launch.preset
    return folder if preset == "auto" else folder / f"{preset}.yaml"


def _paths(images: Iterable[Sequence[str]]) -> list[Path]:
    return [Path(name) for of_prompt in images for name in of_prompt]


def _file(name: str) -> list[Path]:
    return [Path(name)] if Path(name).expanduser().is_file() else []


def _relative(path: Path) -> str:
    """Return a path relative to the project; one outside of it stays absolute."""
    found = os.path.relpath(path.expanduser())
    return os.path.abspath(found) if found.startswith(os.pardir) else found


def _keys(given: Mapping[str, Any], rule: str, phases: int = 1) -> list[str]:
    """List the keys that the file sets and a stage reads; of phases those of the first ones.

    DVC fails for a key that the file does not set.
    """
    wanted: set[str] = set()
    for path in SETTINGS[rule].paths(recorded=True).values():
        key = path.removeprefix("phases.0.train.")
        own = (path,) if key == path else (f"train.{key}", f"phases.0.{key}")
        for one in SPREAD.get(path, own):
            wanted |= {one.replace("*", str(number)) for number in range(phases)}
    return sorted(key for key in wanted if _is_set(given, key))


def _is_set(value: Any, key: str) -> bool:
    for part in key.split("."):
        if isinstance(value, list):
            value = {str(number): one for number, one in enumerate(value)}
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True
