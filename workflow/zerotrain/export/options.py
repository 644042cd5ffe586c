"""Options of the commands export, sample, generate and publish."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from zerotrain.config.command_options import RUN_HELP, config_of, folder_of, folder_option
from zerotrain.errors import PipelineError

WeightsOrRun = Annotated[
    Path,
    typer.Argument(
        metavar="WEIGHTS",
        parser=folder_of,
        help="Exported weights: any folder, or its file. Or RUN or RUN/PHASE: the newest, of a "
        "phase that trains its newest checkpoint.",
    ),
]


@dataclass(frozen=True)
class ExportOptions:
    """Options of `zerotrain export`."""

    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            parser=folder_of,
            help="A checkpoint, rolling or published, a state, a folder of DeepSpeed or "
            "accelerate, or exported weights. Or RUN or RUN/PHASE: the newest of these.",
        ),
    ]
    output: Annotated[Path | None, folder_option("Folder to publish the model at.")] = None
    state: Annotated[Path | None, folder_option("Folder to publish a state at.")] = None
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", parser=config_of, help=f"{RUN_HELP} It has family, base and dtype."
        ),
    ] = None
    family: Annotated[
        str | None, typer.Option(help="Family of the base, where there is no config.")
    ] = None
    base: Annotated[
        Path | None, folder_option("Base model folder; with a config, the run's own.")
    ] = None
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16; default: the config's, else fp32.")
    ] = None
    to: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="diffusers or transformers (default: the model's own library), single_file, ldm; "
            "of a LoRA: diffusers_lora, peft, kohya, merged; universal: what DeepSpeed loads under "
            "another stage.",
        ),
    ] = None
    max_shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Larger files become several; default: 10GB."),
    ] = None
    prefix: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Prefix of each name, of single_file."),
    ] = None
    ema: Annotated[
        bool, typer.Option(help="The averaged weights, where the training kept them.")
    ] = True
    trust_pickle: Annotated[
        bool, typer.Option(help="Let pickles of the checkpoint run code: only where you trust it.")
    ] = False


@dataclass(frozen=True)
class SampleOptions:
    """Options of `zerotrain sample`."""

    weights: WeightsOrRun
    prompt: Annotated[str, typer.Argument(help="What the images are to show.")]
    number: Annotated[int, typer.Option("-n", "--number", help="Images to make.")] = 1
    seed: Annotated[int, typer.Option(help="Seed of the first image; the next has the next.")] = 0
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 30
    guidance: Annotated[
        float | None,
        typer.Option(help="How strongly images follow the prompt; default: the pipeline's own."),
    ] = None
    resolution: Annotated[
        str | None,
        typer.Option(
            metavar="PIXELS", help="Side, or WIDTHxHEIGHT such as 1216x832; default: the model's."
        ),
    ] = None
    base: Annotated[Path | None, folder_option("The base model, of a LoRA or a part alone.")] = None
    image: Annotated[
        list[Path] | None,
        typer.Option(
            "--image",
            metavar="FILE",
            help="A conditioning image, such as the one to edit; repeat it for several.",
        ),
    ] = None
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the images.")] = Path(
        "samples"
    )
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace images of the same prompt and seed.")
    ] = False

    def __post_init__(self) -> None:
        _check_least(("-n", self.number, 1), ("--steps", self.steps, 1), ("--seed", self.seed, 0))
        _check_least(("--guidance", self.guidance, 0))
        for side in self.size or ():
            if side <= 0 or side % 8:
                sides = [str(max(8, one // 8 * 8)) for one in self.size or ()]
                raise PipelineError(
                    f"--resolution: {side} is not a multiple of 8",
                    hint=f"give --resolution {'x'.join(dict.fromkeys(sides))}",
                )

    @property
    def size(self) -> tuple[int, int] | None:
        """Return width and height in pixels, if they were given.

        Raises:
            PipelineError: the text is neither a side nor two.
        """
        if self.resolution is None:
            return None
        found = re.fullmatch(r"(\d+)(?:x(\d+))?", self.resolution)
        if found is None:
            raise PipelineError(
                f"--resolution: {self.resolution!r} is no size in pixels",
                hint="give a side, such as 1024, or WIDTHxHEIGHT, such as 1216x832",
            )
        return int(found[1]), int(found[2] or found[1])


@dataclass(frozen=True)
class GenerateOptions:
    """Options of `zerotrain generate`."""

    weights: WeightsOrRun
    prompt: Annotated[str, typer.Argument(help="What is asked.")]
    number: Annotated[int, typer.Option("-n", "--number", help="Answers to make.")] = 1
    seed: Annotated[int, typer.Option(help="Seed of the first answer; the next has the next.")] = 0
    temperature: Annotated[
        float | None,
        typer.Option(help="0: the likeliest answer; default: 0 for one answer, 1 for several."),
    ] = None
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The system's turn before the question.")
    ] = None
    raw: Annotated[
        bool, typer.Option("--raw", help="Take the prompt as it is, without a chat template.")
    ] = False
    base: Annotated[
        Path | None,
        folder_option(
            "The base model, of a LoRA or a part alone; default: the folder that a peft adapter "
            "names."
        ),
    ] = None

    def __post_init__(self) -> None:
        _check_least(("-n", self.number, 1), ("--max-new-tokens", self.max_new_tokens, 1))
        _check_least(("--seed", self.seed, 0), ("--temperature", self.temperature, 0))
        if self.raw and self.system:
            raise PipelineError(
                "--raw and --system: a raw prompt has no turns",
                hint="write the text into the prompt",
            )
        if self.number > 1 and self.temperature == 0:
            raise PipelineError(
                f"-n: {self.number}, and with --temperature 0 all answers are the same",
                hint="omit --temperature, or set it above 0",
            )


@dataclass(frozen=True)
class PublishOptions:
    """Options of `zerotrain publish`."""

    weights: Annotated[
        Path,
        typer.Argument(
            metavar="WEIGHTS", parser=folder_of, help="A phase's weights, or an exported folder."
        ),
    ]
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="OWNER/NAME on the hub.")]
    card: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the card; default: WEIGHTS-card."),
    ] = None
    license: Annotated[
        str | None, typer.Option(metavar="ID", help="The licence, as the hub names it.")
    ] = None
    private: Annotated[
        bool,
        typer.Option("--private/--public", help="Whether a new repository is private or public."),
    ] = True
    show_captions: Annotated[
        bool,
        typer.Option(
            "--show-captions",
            help="Show samples of the dataset's own captions or questions on the card, too.",
        ),
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the card and list the files; upload nothing.")
    ] = False


def _check_least(*limits: tuple[str, float | None, int]) -> None:
    for option, value, least in limits:
        if value is not None and value < least:
            raise PipelineError(f"{option}: {value} is too small", hint=f"{least} or more")
