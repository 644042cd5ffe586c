"""The tables of keys and values of the supported trainers, each read from its file.

zerotrain.launch.keys has the tables of accelerate, DeepSpeed and the launchers.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from zerotrain.launch.keys import read_tables

_FOLDER = Path(__file__).parent


def _read_values(name: str) -> dict[str, Any]:
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


PROGRAMS = _read_values("programs")
PEFT_SCRIPT = _read_values("peft_script")
SIMPLETUNER_OPTIMIZERS = _read_values("simpletuner_optimizers")
SIMPLETUNER_VALUES = _read_values("simpletuner_values")
DIFFSYNTH_VALUES = _read_values("diffsynth_values")
DIFFUSERS_VALUES = _read_values("diffusers_values")

TRAINER = read_tables(_FOLDER / "trainer.toml")["trainer"]
DIFFSYNTH = read_tables(_FOLDER / "diffsynth.toml")["diffsynth"]

_SIMPLETUNER = read_tables(_FOLDER / "simpletuner.toml")
SIMPLETUNER = _SIMPLETUNER["simpletuner"]
SIMPLETUNER_DATASET = _SIMPLETUNER["data_backend_config"]
LYCORIS = _SIMPLETUNER["lycoris_config"]
OWN_CACHE = SIMPLETUNER["cache_dir"].reason

KOHYA_DATASET = read_tables(_FOLDER / "kohya.toml")["kohya_dataset"]

_DIFFUSERS = read_tables(_FOLDER / "diffusers.toml")
DIFFUSERS = _DIFFUSERS["diffusers"]
_KONTEXT = _DIFFUSERS["dreambooth_lora_flux"] | _DIFFUSERS["kontext"]
SCRIPTS = {
    name: (row["family"], DIFFUSERS | {**_DIFFUSERS, "kontext": _KONTEXT}[row["table"]])
    for name, row in DIFFUSERS_VALUES["scripts"].items()
}
"""The family of each of diffusers' scripts, and its flags with their defaults."""
