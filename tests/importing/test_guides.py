"""The pages for people who come from HF Trainer and from PEFT: their imports give what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from zerotrain.config.read import parse_config
from zerotrain.config.run import RunConfig
from zerotrain.importers.command_line import import_command
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.reading import ImportOptions, import_file

DOCS = Path(__file__).parents[2] / "docs"
PRESETS = Path(__file__).parents[2] / "config" / "launch"
COMMAND = re.compile(r"^    zerotrain launch import .*?--command '(.*?)'$", re.S | re.M)


def imported(page: str) -> ImportedConfig:
    """What the page's own command gives."""
    (command,) = COMMAND.findall((DOCS / page).read_text())
    return import_command(command, ImportOptions(presets=PRESETS))


def changed(found: ImportedConfig, **sections: dict[str, Any]) -> RunConfig:
    """The configuration with sections that the page shows, checked."""
    nested = found.nested()
    for name, values in sections.items():
        nested[name] = {**nested.get(name, {}), **values}
    return parse_config(nested, "the page's")


def test_hf_trainers_page(place: Path) -> None:
    """openMind's command: batch, end, schedule, and Alpaca's text measured on its own rows."""
    found = imported("from-hf-trainer.md")
    config = changed(found)
    (phase,) = config.phases
    assert (phase.launch.preset, phase.launch.num_processes) == ("zero2", 8)
    assert (phase.until, phase.train.global_batch_size) == ("2000 steps", 8)
    assert (phase.train.lr_scheduler, phase.launch.mixed_precision) == ("cosine", "bf16")
    assert (config.data.prompt_template, config.evaluate.split) == ("alpaca", "train")
    assert changed(found, data={"holdout": 0.02}, evaluate={"split": "holdout"})


def test_pefts_page(place: Path) -> None:
    """The script's values, its accuracy on its own rows, and the YAML of any other script."""
    found = imported("from-peft.md")
    config = changed(found)
    (phase,) = config.phases
    assert config.run == "bart-large"
    assert (config.family, config.evaluate.split) == ("seq2seq_lm", "train")
    assert config.lora is not None
    assert (config.lora.rank, config.lora.alpha, config.lora.dropout) == (8, 32.0, 0.1)
    assert (phase.launch.preset, phase.launch.zero3_init) == ("zero3_offload", True)
    assert (phase.train.global_batch_size, phase.train.learning_rate) == (8, 3e-3)
    assert changed(found, data={"holdout": 0.2}, evaluate={"split": "holdout"})
    alone = import_file(Path("ds_zero3_cpu.yaml"), ImportOptions(presets=PRESETS)).values
    assert alone["launch.preset"] == "zero3_offload"
