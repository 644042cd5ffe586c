"""render_launch: a phase of the configuration to accelerate.yaml, deepspeed.json and run.yaml."""

from __future__ import annotations

from pathlib import Path

from zerotrain import artifact
from zerotrain.config import RunConfig
from zerotrain.data.dataset import read_dataset
from zerotrain.launch.files import write_launch_files
from zerotrain.launch.preset import read_preset
from zerotrain.launch.resolve import resolve_phase
from zerotrain.launch.resolved import write_run_yaml
from zerotrain.position import read_position

KIND = "launch"


def render_launch(
    config: RunConfig, phase: str, dataset: Path, preset: Path, start: Path | None, output: Path
) -> None:
    """Write the launch files of one phase.

    Args:
        config: The run's configuration.
        phase: The phase's name.
        dataset: Folder of the dataset, whose number of samples turns epochs into steps.
        preset: The launch preset's file.
        start: State of elsewhere that the run goes on from; None where it begins.
        output: Folder to publish.

    Raises:
        PipelineError: values that do not fit together.
    """
    samples = read_dataset(dataset)
    chosen = read_preset(preset)
    begun = (0, 0)
    if start is not None:
        position = read_position(artifact.read(start, "state"), "state.json")
        begun = position.step, position.samples
    resolved = resolve_phase(config, phase, chosen, samples.epoch_size, begun)
    with artifact.publish(output, KIND) as draft:
        write_run_yaml(resolved, draft.folder / "run.yaml")
        write_launch_files(resolved, chosen, draft.folder, output)
