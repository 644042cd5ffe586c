"""The tables of keys and values of the supported trainers, each read from its file.

zerotrain.launch.keys has the tables of accelerate, DeepSpeed and the launchers.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from zerotrain.launch.keys import read_tables

_FOLDER = Path(__file__).parent
PEFT_SCRIPT = tomllib.loads((_FOLDER / "peft_script.toml").read_text(encoding="utf-8"))
TRAINER = read_tables(_FOLDER / "trainer.toml")["trainer"]
DIFFSYNTH = read_tables(_FOLDER / "diffsynth.toml")["diffsynth"]

_SIMPLETUNER = read_tables(_FOLDER / "simpletuner.toml")
SIMPLETUNER = _SIMPLETUNER["simpletuner"]
SIMPLETUNER_DATASET = _SIMPLETUNER["data_backend_config"]
LYCORIS = _SIMPLETUNER["lycoris_config"]
SIMPLETUNER_OPTIMIZERS = tomllib.loads(
    (_FOLDER / "simpletuner_optimizers.toml").read_text(encoding="utf-8")
)
OWN_CACHE = SIMPLETUNER["cache_dir"].reason

KOHYA_DATASET = read_tables(_FOLDER / "kohya.toml")["kohya_dataset"]

_DIFFUSERS = read_tables(_FOLDER / "diffusers.toml")
DIFFUSERS = _DIFFUSERS["diffusers"]
DREAMBOOTH_FLUX = DIFFUSERS | _DIFFUSERS["dreambooth_flux"]
DREAMBOOTH_LORA_FLUX = DIFFUSERS | _DIFFUSERS["dreambooth_lora_flux"]
DREAMBOOTH_SD3 = DIFFUSERS | _DIFFUSERS["dreambooth_sd3"]
DREAMBOOTH_LORA_SDXL = DIFFUSERS | _DIFFUSERS["dreambooth_lora_sdxl"]
TEXT_TO_IMAGE = DIFFUSERS | _DIFFUSERS["text_to_image"]
KONTEXT = DREAMBOOTH_LORA_FLUX | _DIFFUSERS["kontext"]
