"""The guide's split training of a Qwen-Image LoRA, flag by flag, and the recipe of the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerotrain.config.read import parse_config, read_config
from zerotrain.config.scalar import scalar
from zerotrain.importers.command import parse_commands
from zerotrain.importers.imported_config import ImportedConfig

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from-diffsynth.md"
RECIPE = ROOT / "config" / "qwen-image-lora-24gb.yaml"
COMMANDS = Path(__file__).parent / "references" / "diffsynth" / "commands.sh"
BEGIN, END = "<!-- Qwen-Image: begin -->", "<!-- Qwen-Image: end -->"
DIFFERENCES = {
    "run": "named by the recipe instead of `--output_path`",
    "base": "the whole repository; what the guide does not name of it, the tokenizer, is small",
    "phases.0.name": "`lora` instead of the importer's `train`",
    "phases.0.launch.accelerate.debug": "checks every collective operation, which costs time",
    "export.dtype": "the adapter is written in bf16, as DiffSynth-Studio writes it",
    "cache.max_sequence_length": "the pipeline's own 512; set 1024 for longer captions",
}
"""Where the recipe is not what is imported."""


def leaves(values: Any, path: str = "") -> dict[str, Any]:
    """Every value by its path."""
    items = (
        values.items() if isinstance(values, dict)
        else enumerate(values) if isinstance(values, list) and path == "phases."
        else ()
    )  # fmt: skip
    found: dict[str, Any] = {}
    for key, value in items:
        found |= leaves(value, f"{path}{key}.")
    return found or ({} if values == {} else {path.removesuffix("."): values})


def table(found: ImportedConfig) -> str:
    """What became of each flag of the two commands."""
    prepare, train = (command.arguments for command in parse_commands(COMMANDS.read_text()))
    lines = ["| flag | `sft:data_process` | `sft:train` | here | |", "|---|---|---|---|---|"]
    for flag in dict.fromkeys([*prepare, *train]):
        notes = [n for n in found.notes if n.key.partition(" (")[0] == flag]
        assert notes, flag
        ours = {n.ours: n.value for n in notes if n.ours}
        here = "<br>".join(
            f"`{key}`" if value is None or key == "base" else f"`{key}: {scalar(value)}`"
            for key, value in ours.items()
        )
        reasons = "; ".join(
            dict.fromkeys(
                n.reason for n in notes if n.reason and (not ours or n.outcome != "no-op")
            )
        )
        given = (_shown(arguments.get(flag)) for arguments in (prepare, train))
        lines.append(f"| `--{flag}` | {' | '.join(given)} | {here or 'no-op'} | {reasons} |")
    lines += ["", "The recipe differs from what is imported in:", ""]
    lines += ["| key | imported | recipe | why |", "|---|---|---|---|"]
    for key, (imported, recipe) in differences(found).items():
        values = " | ".join("" if v is None else f"`{scalar(v)}`" for v in (imported, recipe))
        lines.append(f"| `{key}` | {values} | {DIFFERENCES[key]} |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return "" if value is None else "given" if value is True else f"`{value}`"


def differences(found: ImportedConfig) -> dict[str, tuple[Any, Any]]:
    """The keys of the whole configuration, defaults filled in, whose values are not the same.

    Training and launch are compared in the phase, into which they are merged.
    """
    imported, recipe = (
        leaves({**run.model_dump(), "cache": run.resolved_cache.model_dump()})
        for run in (parse_config(found.nested(), "imported"), read_config(RECIPE))
    )
    return {
        key: (imported.get(key), recipe.get(key))
        for key in dict.fromkeys([*imported, *recipe])
        if imported.get(key) != recipe.get(key) and not key.startswith(("train.", "launch."))
    }


def test_the_recipe_is_the_guides_command_key_by_key(
    imported: Callable[..., ImportedConfig],
) -> None:
    """What differs is listed with its reason."""
    assert set(differences(imported("diffsynth/commands.sh", "bf16"))) == set(DIFFERENCES)


def test_the_page_has_every_flag(
    imported: Callable[..., ImportedConfig], generated: Callable[[Path, str], None]
) -> None:
    """And what the importer makes of it."""
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    found = imported("diffsynth/commands.sh", "bf16")
    generated(PAGE, f"{before}{BEGIN}\n{table(found)}\n{END}{after}")
