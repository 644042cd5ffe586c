"""The page on which a user chooses what to start from: a recipe, a run, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from zerotrain.artifact.documents import read_text
from zerotrain.artifact.layout import CONFIGS, RESULTS
from zerotrain.builder.pages import page
from zerotrain.builder.places import comment_at_top
from zerotrain.builder.writing import MOST_BYTES
from zerotrain.run.watch.state import describe_fault


@dataclass(frozen=True)
class Source:
    """A configuration to start from.

    Attributes:
        path: Its file, relative to the project.
        about: The comment at its top.
        trained: Whether results of its run are here.
    """

    path: str
    about: str
    trained: bool


def find_sources() -> list[Source]:
    """List the configurations of the project, by their names."""
    found = []
    for path in sorted(CONFIGS.glob("*.yaml")):
        try:
            found.append(_describe(path))
        except Exception as error:  # one entry never keeps the others from being shown
            found.append(Source(path.as_posix(), describe_fault(error), False))
    return found


def _describe(path: Path) -> Source:
    """Describe a configuration by its text: an invalid one is offered, too, to be corrected."""
    text = read_text(path, most=MOST_BYTES, follow_links=True, errors="replace")
    named = (line for line in text.splitlines() if line.startswith("run:"))
    run = next(named, "").partition(":")[2].split("#")[0].strip()
    trained = bool(run) and "/" not in run and (RESULTS / run).is_dir()
    return Source(path.as_posix(), comment_at_top(text), trained)


def show(_: Request) -> Response:
    """Answer with the page."""
    sources = find_sources()
    groups = [
        ("Your runs", [one for one in sources if one.trained]),
        ("Recipes and configurations", [one for one in sources if not one.trained]),
    ]
    return page("start", {"groups": groups}, here="/")


routes = [Route("/", show)]
