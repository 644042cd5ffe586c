"""The commands that a person calls and no rule does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerotrain.cli.options import folder_of
from zerotrain.errors import PipelineError


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            parser=folder_of,
            help="A checkpoint, rolling or published, a state, a folder of DeepSpeed or "
            "accelerate, or exported weights.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(parser=folder_of, metavar="FOLDER", help="Folder to publish the model at."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(parser=folder_of, metavar="FOLDER", help="Folder to publish a state at."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The run's config: family, base and dtype.")
    ] = None,
    family: Annotated[
        str | None, typer.Option(help="Family of the base, where there is no config.")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            parser=folder_of,
            metavar="FOLDER",
            help="Base model folder; with a config, the run's own.",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16; default: the config's, else fp32.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="diffusers or transformers (default: the model's own library), single_file, ldm; "
            "of a LoRA: diffusers_lora, peft, kohya, merged; universal: what DeepSpeed loads under "
            "another stage.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Larger files become several; default: 10GB."),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What stands before each name, of single_file."),
    ] = None,
    ema: Annotated[
        bool, typer.Option(help="The averaged weights, where the training kept them.")
    ] = True,
    trust_pickle: Annotated[
        bool, typer.Option(help="Let pickles of the checkpoint run code: only where you trust it.")
    ] = False,
) -> None:
    """Export a checkpoint or exported weights in any form, after checking it; or a state."""
    from zerotrain.export_by_hand import export_by_hand

    export_by_hand(
        checkpoint, output, state, config=config, family=family, base=base, dtype=dtype, to=to,
        max_shard_size=max_shard_size, prefix=prefix, ema=ema, trust_pickle=trust_pickle,
    )  # fmt: skip


def sample(
    weights: Annotated[
        Path,
        typer.Argument(
            metavar="WEIGHTS", parser=folder_of, help="Exported weights: any folder, or its file."
        ),
    ],
    prompt: Annotated[str, typer.Argument(help="What the images are to show.")],
    number: Annotated[int, typer.Option("-n", "--number", help="Images to make.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the first image; the next has the next.")] = 0,
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 30,
    guidance: Annotated[
        float | None,
        typer.Option(help="How strongly images follow the prompt; default: the pipeline's own."),
    ] = None,
    resolution: Annotated[
        int | None, typer.Option(metavar="PIXELS", help="Side; default: the model's own.")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            parser=folder_of, metavar="FOLDER", help="The base model, of a LoRA or a part alone."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the images.")] = Path(
        "samples"
    ),
) -> None:
    """Make images by exported weights of any format."""
    from zerotrain.sample import sample

    if resolution is not None and (resolution <= 0 or resolution % 8):
        raise PipelineError(
            f"--resolution: {resolution} is no multiple of 8",
            hint=f"give --resolution {max(8, resolution // 8 * 8)}",
        )
    for file in sample(
        weights, prompt, out, number=number, seed=seed, steps=steps, guidance=guidance,
        resolution=resolution, base=base,
    ):  # fmt: skip
        print(f"wrote {file}")


def generate(
    weights: Annotated[
        Path,
        typer.Argument(
            metavar="WEIGHTS", parser=folder_of, help="Exported weights: any folder, or its file."
        ),
    ],
    prompt: Annotated[str, typer.Argument(help="What is asked.")],
    number: Annotated[int, typer.Option("-n", "--number", help="Answers to make.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the first answer; the next has the next.")] = 0,
    temperature: Annotated[
        float | None,
        typer.Option(help="0: the likeliest answer; default: 0 for one answer, 1 for several."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The system's turn before the question.")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            parser=folder_of,
            metavar="FOLDER",
            help="The base model, of a LoRA or a part alone; default: the folder that a peft "
            "adapter names.",
        ),
    ] = None,
) -> None:
    """Answer a prompt by exported weights of a language model, of any format."""
    from zerotrain.generate import generate

    answers = generate(
        weights, prompt, number=number, seed=seed, temperature=temperature,
        max_new_tokens=max_new_tokens, system=system, base=base,
    )  # fmt: skip
    print("\n---\n".join(answers))


def publish(
    weights: Annotated[
        Path,
        typer.Argument(
            metavar="WEIGHTS", parser=folder_of, help="A phase's weights, or an exported folder."
        ),
    ],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="OWNER/NAME on the hub.")],
    card: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the card; default: WEIGHTS-card."),
    ] = None,
    license: Annotated[
        str | None, typer.Option(metavar="ID", help="The licence, as the hub names it.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = (
        False
    ),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the card and list the files; upload nothing.")
    ] = False,
) -> None:
    """Write a model card and upload weights and card to the hub."""
    from zerotrain.publish import publish

    publish(weights, repo_id, card, license=license, private=private, dry_run=dry_run)


def new(
    name: Annotated[str, typer.Argument(help="Name of the run: config/NAME.yaml.")],
    images: Annotated[Path, typer.Option(metavar="DIR", help="Folder of your images.")],
    base: Annotated[str, typer.Option(metavar="MODEL", help="Folder or hub id of the model.")],
) -> None:
    """Write a commented configuration for a folder of your own images."""
    from zerotrain.new import new

    path = new(name, images, base)
    print(f"wrote {path}; look at it, then: make train CONFIG={path}")


def check(
    config: Annotated[Path, typer.Argument(metavar="FILE", help="The run's config, or a sweep's.")],
) -> None:
    """Check a configuration file, and say nothing where it is right."""
    from zerotrain.config.runs import read_runs

    read_runs(config)


def switch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or its config.")],
    to: Annotated[
        str, typer.Option("--to", metavar="PRESET", help="Launch preset to go on under.")
    ],
    at: Annotated[
        str, typer.Option(metavar="STEP", help="Saved step to end the phase at, or `last`.")
    ] = "last",
    name: Annotated[
        str | None, typer.Option(help="Name of the new phase; default: PHASE-PRESET.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The run's config, where several fit.")
    ] = None,
    offload_path: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder on a fast disk, for presets that use one."),
    ] = None,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long a running training may take to stop.")
    ] = 600.0,
    accept: Annotated[
        bool, typer.Option("--accept", help="Go on though code, data or values have changed.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")
    ] = False,
) -> None:
    """End the phase that trains where it stands, export it, and go on under another launch."""
    from zerotrain.switch import switch

    said = switch(
        run,
        to,
        at=at,
        name=name,
        config=config,
        offload_path=offload_path,
        wait=wait,
        accept=accept,
        dry_run=dry_run,
    )
    print(said)


def build_ops() -> None:
    """Build DeepSpeed's compiled ops into the environment (set-up does it)."""
    from zerotrain.compiled_ops import build_ops

    build_ops()


def doctor(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Name of a run, or its config.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The run's config, where several fit.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look at machine, installation and a run, ready to paste. Exit code 1: it would not train."""
    from zerotrain.doctor.examine import examine

    report = examine(run, config)
    print(report.json() if json else report.text(), end="")
    raise typer.Exit(1 if report.problems else 0)
