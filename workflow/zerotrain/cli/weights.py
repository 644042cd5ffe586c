"""Commands that use exported weights: export, publish, sample, generate."""

from __future__ import annotations

from dataclasses import replace

from zerotrain.export.options import (
    ExportOptions,
    GenerateOptions,
    PublishOptions,
    SampleOptions,
)


def export(options: ExportOptions) -> None:
    """Export a checkpoint or exported weights in any form, after checking it; or a state."""
    from zerotrain.export.command import export_command
    from zerotrain.run.trained_weights import exportable

    checkpoint, config = exportable(options.checkpoint, options.config)
    export_command(replace(options, checkpoint=checkpoint, config=config))


def sample(options: SampleOptions) -> None:
    """Make images by exported weights of any format, or by those of a run."""
    from zerotrain.export.sample import sample
    from zerotrain.run.trained_weights import usable_weights

    with usable_weights(options.weights) as found:
        for file in sample(replace(options, weights=found)):
            print(f"wrote {file}")


def generate(options: GenerateOptions) -> None:
    """Answer a prompt by exported weights of a language model, or by those of a run."""
    from zerotrain.export.generate import generate
    from zerotrain.run.trained_weights import usable_weights

    with usable_weights(options.weights) as found:
        answers = generate(replace(options, weights=found))
    print("\n---\n".join(answers))


def publish(options: PublishOptions) -> None:
    """Write a model card and upload weights and card to the hub."""
    from zerotrain.export.publish import publish

    publish(options)
