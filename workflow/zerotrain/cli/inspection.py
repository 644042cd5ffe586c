"""Commands that inspect: watch, doctor, trace, cache, cluster check; and the set-up's build_ops."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerotrain.config.command_options import RUN_HELP, config_of
from zerotrain.config.suggestions import known_names
from zerotrain.errors import PipelineError

FORMATS = ("text", "json", "mermaid")

cluster_app = typer.Typer(
    name="cluster", help="The cluster that jobs are sent to.", no_args_is_help=True
)


def doctor(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help=RUN_HELP)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    nvme: Annotated[
        bool, typer.Option("--nvme", help="Train a small model to check the RUN's NVMe offload.")
    ] = False,
) -> None:
    """Look at machine, installation and a run, ready to paste. Exit code 1: it would not train."""
    from zerotrain.run.doctor.examine import examine

    if nvme and run is None:
        raise PipelineError("doctor --nvme: name a RUN", hint="`zerotrain doctor RUN --nvme`")
    report = examine(run, nvme=nvme)
    print(report.json() if json else report.text(), end="")
    raise typer.Exit(1 if report.problems else 0)


def watch(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help=f"{RUN_HELP} Default: the one at work, or the newest."
        ),
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(
            min=0.1, metavar="SECONDS", help="Time between two looks; default: 2, in a pipe 10."
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print it once as JSON.")] = False,
) -> None:
    """Show a run's stages, position, loss and pace until it is over; Ctrl-C ends the view alone.

    Exit code 1: the run was stopped or has failed.
    """
    from zerotrain.run.watch.command import watch

    raise typer.Exit(watch(run, interval, once=once, as_json=json))


def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|PHASE...", help="RUN, RUN/PHASE, a configuration file, or a folder."
        ),
    ],
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="The page to write.")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and write no page.")
    ] = False,
) -> None:
    """Compare runs or phases: curves, metrics, samples, and the values that differ."""
    from zerotrain.run.compare.command import compare

    compare(names, output, as_json=json)


def why(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [TARGET]",
            help=f"{RUN_HELP} A rule, a file of the results, or a phase: PHASE or RUN/PHASE.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what would run, why, and what it costs in time and disk; change nothing."""
    from zerotrain.graph.why.report import split_words, why

    print(why(*split_words(words or []), as_json=json), end="")


def trace(
    weights: Annotated[
        Path | None,
        typer.Argument(metavar="[WEIGHTS]", help="Exported weights: a folder, or a file in one."),
    ] = None,
    image: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="List the weights that this image went into instead."),
    ] = None,
    format: Annotated[str, typer.Option(help="text, json or mermaid.")] = "text",
) -> None:
    """Walk from weights back to their images, verifying every hash. Exit code 1: not whole."""
    if format not in FORMATS:
        raise PipelineError(
            f"--format: {format!r} is not known", hint=known_names(format, FORMATS, "formats")
        )
    if (weights is None) == (image is None):
        raise PipelineError(
            "trace takes weights, or an image",
            hint="zerotrain trace WEIGHTS, or zerotrain trace --image FILE",
        )
    if image is not None:
        from zerotrain.run.lineage.trace import document, flowchart, text, uses_of

        uses = uses_of(image)
        print({"text": text, "json": document, "mermaid": flowchart}[format](uses), end="")
        raise typer.Exit(0 if uses.known else 1)
    assert weights is not None
    from zerotrain.run.lineage import report
    from zerotrain.run.lineage.trace import trace

    walk = trace(weights)
    shown = {"text": report.text, "json": report.document, "mermaid": report.flowchart}[format]
    print(shown(walk), end="")
    raise typer.Exit(0 if walk.whole else 1)


@cluster_app.command()
def check(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]",
            parser=config_of,
            help=f"{RUN_HELP} Whether the cluster can hold its phases.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write a starting profile, as profiles/mine."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a profile.")] = False,
    partition: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where to train; default: it chooses.")
    ] = None,
    account: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whom Slurm bills; default: yours.")
    ] = None,
    no_job: Annotated[bool, typer.Option("--no-job", help="Submit no trial job.")] = False,
    wait: Annotated[
        int, typer.Option(min=1, metavar="SECONDS", help="The trial job may be queued so long.")
    ] = 60,
) -> None:
    """Look at a Slurm cluster from its login node. Exit code 1: a training would not start."""
    from zerotrain.config.read import read_config
    from zerotrain.graph.cluster import findings, profile
    from zerotrain.graph.cluster.profile import choose
    from zerotrain.graph.cluster.slurm import ask_slurm
    from zerotrain.graph.cluster.trial import try_job

    run = read_config(config) if config else None
    if output and not force:
        profile.check_absent(output)
    cluster = ask_slurm()
    choice = choose(cluster, partition, account)
    found = findings.of_cluster(cluster, choice)
    trial = None
    if not no_job:
        trial = try_job(choice.training, Path(), choice.account, wait)
        found += findings.of_trial(trial, choice.training)
    if run:
        from zerotrain.graph.cluster.findings import of_phases  # imports torch, to forecast memory

        found += of_phases(run, choice.training)
    if output:
        profile.write_profile(output, profile.render_profile(cluster, choice, trial))
    count = sum(one.level == "problem" for one in found)
    print("\n".join(map(str, found)))
    print(f"{count} problem{'s' if count > 1 else ''}" if count else "no problem found")
    if output:
        print(f"wrote {output / profile.FILE}: snakemake --profile {output} train")
    raise typer.Exit(1 if count else 0)


def build_ops() -> None:
    """Build DeepSpeed's compiled ops into the environment (set-up does it)."""
    from zerotrain.machine.compiled_ops import build_ops

    build_ops()


cache_app = typer.Typer(
    name="cache", help="Encoded samples: what they take, and are they whole.", no_args_is_help=True
)

Caches = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN|FOLDER]", help=f"{RUN_HELP} Or a cache; default: all of the project."
    ),
]


@cache_app.command()
def show(caches: Caches = None) -> None:
    """Show samples, sizes, bytes on disk, orphans, what encoded them, and the runs on it."""
    from zerotrain.run.caches import find_caches, show

    for place in find_caches(caches):
        print("\n".join(show(place)))


@cache_app.command()
def prune(
    caches: Caches = None,
    unfinished: Annotated[
        bool,
        typer.Option("--unfinished", help="Also what an interrupted encoding would continue from."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
) -> None:
    """Remove what no sample needs now: it is encoded again if an edit brings it back."""
    from zerotrain.run.caches import find_caches, prune

    for place in find_caches(caches):
        print("\n".join(prune(place, unfinished=unfinished, dry_run=dry_run)))


@cache_app.command()
def verify(caches: Caches = None) -> None:
    """Hash every shard, and list damage by sample. Exit code 1: a cache is not whole."""
    from zerotrain.run.caches import find_caches, verify

    verdicts = [verify(place) for place in find_caches(caches)]
    for verdict in verdicts:
        print("\n".join(verdict.lines))
    raise typer.Exit(0 if all(verdict.whole for verdict in verdicts) else 1)
