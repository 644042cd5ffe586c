"""Commands whose options are the fields of a dataclass, each with its type and its help."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer


def folder_of(text: str) -> Path:
    """Return a folder, also where its manifest.json is named, as the rules do."""
    path = Path(text)
    return path.parent if path.name == "manifest.json" else path


def folder_option(help: str) -> typer.models.OptionInfo:
    """Return an option that takes a folder."""
    option: typer.models.OptionInfo = typer.Option(parser=folder_of, metavar="FOLDER", help=help)
    return option


def config_of(text: str | Path) -> Path:
    """Return the configuration file of a run that is named by its name or by that file.

    Raises:
        PipelineError: no file has the run, or several have.
    """
    from zerotrain.config.runs import find_config

    return find_config(str(text))


RUN_HELP = "Name of a run, or its configuration."
RunFile = Annotated[Path, typer.Argument(metavar="RUN", parser=config_of, help=RUN_HELP)]
"""Of the commands for people; those that open no configuration take the text itself."""
AnyRunFile = Annotated[Path, typer.Argument(metavar="[RUN]", parser=config_of, help=RUN_HELP)]
RunName = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of its one parameter `options`, a dataclass, as its own parameters.

    typer reads the type, help and default of each option from them.
    """
    options = inspect.signature(command, eval_str=True).parameters["options"].annotation
    assert is_dataclass(options)
    types = get_type_hints(options, include_extras=True)

    def run(**given: Any) -> None:
        command(options(**given))  # type: ignore[operator]

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=types[field.name],
            )
            for field in fields(options)
        ]
    )
    return run
