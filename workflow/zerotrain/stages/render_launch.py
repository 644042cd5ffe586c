"""render_launch: write a phase's accelerate.yaml, deepspeed.json and run.yaml."""

from __future__ import annotations

import sys
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact.recipe import Recipe
from zerotrain.config.stage_settings import LaunchSettings
from zerotrain.data.dataset import read_dataset
from zerotrain.errors import PipelineError
from zerotrain.launch.files import write_launch_files, write_run_yaml
from zerotrain.launch.preset import Preset, read_preset
from zerotrain.launch.resolve import resolve_phase
from zerotrain.models.sizes import read_sizes
from zerotrain.state.position import read_position

KIND = "launch"


def render_launch(
    settings: LaunchSettings,
    dataset: Path,
    preset: Path,
    base: Path | None,
    start: Path | None,
    output: Path,
    cache: Path | None = None,
    recipe: Recipe | None = None,
) -> None:
    """Write the launch files of one phase.

    Args:
        settings: What the stage reads of the configuration, up to the phase.
        dataset: Folder of the dataset, whose number of samples turns epochs into steps.
        preset: The launch preset's file.
        base: Folder of the base model, whose sizes decide ZeRO's; plain PyTorch needs none.
        start: External state that the run continues from; None without one.
        output: Folder to publish.
        cache: Folder of a text family's cache, whose rows are counted; for images the dataset's
            samples are.
        recipe: What the folder records of what it is made from.

    Raises:
        PipelineError: values do not fit together.
    """
    phase = settings.phases[-1]
    epoch_size = _epoch_size(settings, dataset, cache)
    chosen, why = read_preset(preset), ""
    if chosen.engine == "auto":
        chosen, why = _choose(settings, preset, base)
    start_position = (0, 0)
    if start is not None:
        position = read_position(artifact.read(start, "state"), "state.json")
        start_position = position.step, position.samples
    sizes = None
    if chosen.engine == "deepspeed":
        if base is None:
            raise PipelineError(
                f"phase {phase.name}: preset {chosen.name} is fitted to the model, and none is "
                "named",
                hint="give --base, the folder of the base model",
            )
        sizes = read_sizes(
            artifact.read(base, "base", verify=False),
            settings.family,
            settings.adapter_values(),
            settings.frozen_parameters,
            settings.trainable_parameters,
        )
    resolved = resolve_phase(settings, chosen, epoch_size, sizes, start_position, why)
    with artifact.publish(output, KIND, recipe=recipe) as draft:
        write_run_yaml(resolved, draft.folder / "run.yaml")
        write_launch_files(resolved, draft.folder, output)


def _epoch_size(settings: LaunchSettings, dataset: Path, cache: Path | None) -> int:
    if not settings.is_text:
        return read_dataset(dataset).epoch_size
    if cache is None:
        raise PipelineError(
            f"family {settings.family}: an epoch has as many samples as the cache has rows, and no "
            "cache is named",
            hint="give --cache, the folder of the phase's cache",
        )
    return int(artifact.read(cache, "cache", verify=False).content["epoch_size"])


def _choose(settings: LaunchSettings, auto: Path, base: Path | None) -> tuple[Preset, str]:
    """Return the lowest preset that fits this machine's GPU, and why."""
    from zerotrain.launch.planner import planner

    phase = settings.phases[-1]
    made = planner.plan(settings, phase.name, planner.this_machine(phase), auto=auto, base=base)
    name, why = planner.choose_preset(made)
    print(f"{phase.name}: {name}: {why}", file=sys.stderr, flush=True)
    return read_preset(auto.with_name(f"{name}.yaml")), why
