"""fetch: what jobs would take from the hub, put into a folder that every node sees."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from zerotrain.base_places import base_files
from zerotrain.config import read_config
from zerotrain.families import load_family

ENVIRONMENT = "env.sh"


def variables(folder: Path) -> dict[str, str]:
    """Where the hub's libraries keep files; HF_HOME stays, since the login's token lies there."""
    return {"HF_HUB_CACHE": str(folder.resolve() / "hub")}


def fetch(configs: list[Path], folder: Path) -> Iterator[str]:
    """Download the bases of the configurations; what is there already is not downloaded again.

    The environment has to hold `variables(folder)` before the hub's library is imported.

    Raises:
        PipelineError: a configuration or base is wrong, or the hub gives nothing.
    """
    for path in configs:
        config = read_config(path)
        if config.is_preset:
            yield f"{path}: base {config.base} is built, nothing to fetch"
            continue
        for place, wanted in base_files(config, load_family(config.family)).places:
            found = place.fetch(wanted.values(), revision=config.revision or "main")
            size = sum((found / name).stat().st_size for name in wanted.values())
            yield f"{path}: {place.name}: {len(wanted)} files, {size / 1e6:.1f} MB in {found}"
    folder.mkdir(parents=True, exist_ok=True)
    exports = {**variables(folder), "HF_HUB_OFFLINE": "1"}
    text = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in exports.items())
    (folder / ENVIRONMENT).write_text(text)
    yield f"each job begins with: source {shlex.quote(str(folder.resolve() / ENVIRONMENT))}"
