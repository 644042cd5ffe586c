"""dvc.yaml, generated from a configuration: a stage per folder of results, or per phase."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from zerotrain.artifact import MANIFEST, write_whole
from zerotrain.artifact.layout import DATA, OF_PHASE, RESULTS, DataFolder, RunFolder
from zerotrain.config import MAIN_CONFIG
from zerotrain.config.models import Phase
from zerotrain.config.read import load_config
from zerotrain.config.run import RunConfig
from zerotrain.config.runs import config_option, read_runs
from zerotrain.config.stage_settings import SETTINGS
from zerotrain.data.dataset_folder import SAMPLES
from zerotrain.data.open import source_files, source_roots
from zerotrain.errors import PipelineError
from zerotrain.graph.dvc.files import PIPELINE, as_text, load_pipeline
from zerotrain.graph.runs import Runs
from zerotrain.importers import enable_launch_files
from zerotrain.models.base_places import local_folders


def plots_of(run: RunConfig) -> list[dict[str, Any]]:
    """Return the curves over all steps, from the last phase's evaluation, and of each phase the
    metrics and the grid."""
    folders = [RunFolder(run.run).phase(phase.name).evaluation for phase in run.phases]
    curves: dict[str, tuple[str, str | list[str], str]] = {
        "Training loss": ("loss.csv", "loss", "loss"),
        **_validation(run),
        "Learning rate": ("loss.csv", "learning_rate", "learning rate"),
        "Memory": ("records/memory.csv", ["host_bytes", "device_bytes"], "bytes"),
    }
    plots: list[dict[str, Any]] = [
        {title: {"x": "step", "y": {f"{folders[-1]}/{file}": column}, "y_label": label}}
        for title, (file, column, label) in curves.items()
    ]
    plots += [
        {
            f"{title} of each phase": {
                "template": "scatter",
                "x": "step",
                "y": {f"{folder}/metrics.csv": metric for folder in folders},
                "y_label": title.lower(),
            }
        }
        for metric, title in _plotted_metrics(run).items()
    ]
    if not run.is_text:
        plots += [{str(folder / "grid.png"): None} for folder in folders]
    return plots


def _validation(run: RunConfig) -> dict[str, tuple[str, str | list[str], str]]:
    """Return the curve of the validations by its title; empty for a run without any."""
    validated = [phase for phase in run.phases if phase.validation]
    if not validated:
        return {}
    averaged = any(phase.train.use_ema for phase in validated)
    columns = ["val_loss", "val_loss_ema"] if averaged else "val_loss"
    return {"Validation loss": ("validation.csv", columns, "loss")}


def _plotted_metrics(run: RunConfig) -> dict[str, str]:
    """Return the metrics that every evaluation of a run has, with their titles."""
    metrics = {"train_loss": "Training loss"}
    if run.data.holdout:
        metrics["val_loss"] = "Held-out loss"
    if run.evaluate.judge != "none" and not run.is_text:
        metrics["prompt_accuracy"] = "Prompt accuracy"
    if run.is_text and run.data.holdout:
        metrics["exact_match"] = "Exact match"
    return metrics


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


TEMPLATE = "${"
"""What DVC reads as the beginning of a value to insert, in every text of dvc.yaml."""


def generate(config: Path, output: Path = PIPELINE) -> None:
    """Write dvc.yaml for the runs of a configuration; what is in it of others stays.

    Args:
        config: The configuration.
        output: File to write; the old text stays until the new text is complete.

    Raises:
        PipelineError: the configuration or the old file is wrong.
        DiskError: the disk is full or read-only, or fails.
    """
    loaded = load_pipeline(output) if output.is_file() else {}
    write_whole(output, as_text(merged(loaded, pipeline(config), config)))


def pipeline(config: Path) -> dict[str, Any]:
    """Build the stages and plots of a configuration's runs.

    Raises:
        PipelineError: the configuration is wrong, or a name holds `${`.
    """
    enable_launch_files()
    by_file = read_runs(config)
    runs = Runs(by_file)
    stages: dict[str, Stage] = {}
    for file, run in by_file.items():
        for folder, stage in stages_of(run, Path(file), config, runs):
            name = "-".join(folder.relative_to(RESULTS).parts)
            if stages.get(name, stage)["outs"] != stage["outs"]:
                raise PipelineError(
                    f"{config}: two stages of dvc.yaml would have the name {name}",
                    hint="rename the run or the phase, so that no run has the name of another with "
                    "a phase's behind it",
                )
            stages.setdefault(name, stage)
    made = {
        "stages": stages,
        "plots": [plot for run in by_file.values() for plot in plots_of(run)],
    }
    for text in _texts(made):
        if TEMPLATE in text:
            raise PipelineError(
                f"{text!r}: holds {TEMPLATE}, which DVC would replace by a value of params.yaml",
                hint="rename the file or folder, and correct the configuration",
            )
    return made


def merged(loaded: Mapping[str, Any], made: Mapping[str, Any], config: Path) -> dict[str, Any]:
    """Return a dvc.yaml in which the stages and plots of a configuration are replaced.

    Args:
        loaded: The content of dvc.yaml.
        made: The stages and plots of the configuration as it is now.
        config: The configuration.
    """
    stages = loaded.get("stages") or {}
    others = {name: stage for name, stage in stages.items() if config_of(stage) != config}
    former = [stage for name, stage in stages.items() if name not in others]
    outs = [out for stage in [*former, *made["stages"].values()] for out in outputs_of(stage)]
    runs = tuple({f"{RESULTS}/{out.split('/')[1]}/" for out in outs} - {f"{RESULTS}/{DATA}/"})
    plots = [
        plot
        for plot in loaded.get("plots") or []
        if not any(text.startswith(runs) for text in _texts(plot))
    ]
    return {
        **loaded,
        "stages": made["stages"] | {n: one for n, one in others.items() if n not in made["stages"]},
        "plots": [*made["plots"], *plots],
    }


def config_of(stage: Any) -> Path | None:
    """Return the configuration of a generated stage; None for a stage of the user."""
    command = stage.get("cmd") if isinstance(stage, Mapping) else None
    try:
        words = shlex.split(command) if isinstance(command, str) else []
    except ValueError:
        return None
    if words[:3] != ["snakemake", "--cores", "all"] or not outputs_of(stage):
        return None
    chosen = [after for word, after in pairwise(words) if word == "--configfile"]
    return Path(chosen[0]) if chosen else MAIN_CONFIG


def outputs_of(stage: Mapping[str, Any]) -> list[str]:
    """List the outputs and metrics of a stage below results/."""
    lists = [stage.get(key) for key in ("outs", "metrics")]
    listed = [one for found in lists if isinstance(found, list) for one in found]
    names = [next(iter(one), None) if isinstance(one, Mapping) else one for one in listed]
    return [one for one in names if isinstance(one, str) and one.startswith(f"{RESULTS}/")]


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of dvc.yaml, keys included."""
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
