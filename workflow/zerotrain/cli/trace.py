"""zerotrain trace: where weights came from, and where an image went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerotrain.errors import PipelineError

FORMATS = ("text", "json", "mermaid")


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
            f"--format: {format!r} is not known", hint=f"choose one of {', '.join(FORMATS)}"
        )
    if (weights is None) == (image is None):
        raise PipelineError(
            "trace takes weights, or an image",
            hint="zerotrain trace WEIGHTS, or zerotrain trace --image FILE",
        )
    if image is not None:
        from zerotrain.lineage.image import document, flowchart, text, uses_of

        uses = uses_of(image)
        print({"text": text, "json": document, "mermaid": flowchart}[format](uses), end="")
        raise typer.Exit(0 if uses.known else 1)
    assert weights is not None
    from zerotrain.lineage import report
    from zerotrain.lineage.trace import trace

    walk = trace(weights)
    shown = {"text": report.text, "json": report.document, "mermaid": report.flowchart}[format]
    print(shown(walk), end="")
    raise typer.Exit(0 if walk.whole else 1)
