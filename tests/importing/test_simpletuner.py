"""SimpleTuner's datasets, LyCORIS and quantized bases, and the files next to them."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders.caching import encode_pixels
from tests.builders.images import write_pictures
from tests.builders.runs import make_run

from zerotrain.config.adapters import is_excluded
from zerotrain.config.read import parse_config
from zerotrain.errors import PipelineError
from zerotrain.importers.command_line import import_command
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.keys import SIMPLETUNER
from zerotrain.importers.program import OTHER_PARTS
from zerotrain.importers.reading import ImportOptions, import_file, launch_from_file
from zerotrain.launch.planner.architecture import find_architecture
from zerotrain.launch.planner.model import build_part
from zerotrain.models.families import load_family

PRESETS = Path(__file__).parents[2] / "config" / "launch"
USUAL: dict[str, Any] = {
    "model_family": "flux", "model_type": "lora", "pretrained_model_name_or_path": "a/model",
    "max_train_steps": 100, "num_train_epochs": 0, "data_backend_config": "sets.json",
}  # fmt: skip
DATASET: dict[str, Any] = {
    "id": "mine", "type": "local", "instance_data_dir": "photos", "crop": True,
    "crop_style": "center", "crop_aspect": "square", "resolution": 512, "resolution_type": "pixel",
    "caption_strategy": "filename",
}  # fmt: skip
EMBEDS = {"id": "texts", "type": "local", "dataset_type": "text_embeds", "cache_dir": "texts"}


def read(place: Path, datasets: Any = None, **given: Any) -> ImportedConfig:
    """A config.json next to its file of datasets."""
    (place / "sets.json").write_text(json.dumps(datasets or [DATASET, EMBEDS]))
    (place / "config.json").write_text(json.dumps({**USUAL, **given}))
    return import_file(Path("config.json"), ImportOptions(presets=PRESETS))


def keys_of(found: ImportedConfig, outcome: str) -> set[str]:
    """The keys of which the report says this."""
    return {note.key for note in found.notes if note.outcome == outcome}


def test_several_datasets_are_cached_from_as_they_are(place: Path) -> None:
    """Each is a source with its captions, repeats and resolution, next to the run's settings."""
    write_pictures(place / "photos", ["x"], count=2)
    write_pictures(place / "small", ["a house"], count=3)
    small = {
        "id": "small ones", "instance_data_dir": "small", "resolution": 16, "repeats": 2,
        "caption_strategy": "textfile",
    }  # fmt: skip
    datasets = [DATASET | {"resolution": 32}, DATASET | small, EMBEDS]
    found = read(place, datasets).nested()
    assert found["data"] == {
        "source": "folder",
        "sources": [
            {"name": "mine", "images": "photos", "caption_strategy": "filename"},
            {"name": "small-ones", "images": "small", "caption_strategy": "textfile",
             "multiline_captions": "split", "repeats": 3, "resolution": 16},
        ],
    }  # fmt: skip
    assert found["train"]["resolution"] == 32
    alone = import_file(Path("sets.json"), ImportOptions(presets=PRESETS)).nested()
    assert (alone["data"], alone["train"]) == (found["data"], {"resolution": 32})
    run = make_run(family="qwen_image", vae="identity", **alone)
    cache = encode_pixels(parse_config(run, "imported"), 32, place / "made")
    assert [(one.file, one.repeats, one.target_size) for one in cache.entries] == [
        *((f"mine/{number}.png", 1, (32, 32)) for number in range(2)),
        *((f"small-ones/{number}.png", 3, (16, 16)) for number in range(3)),
    ]


def test_a_probability_is_a_share_of_an_epoch(place: Path) -> None:
    """Times the repeats; of one dataset it says nothing, and equal shares are refused."""
    datasets = [
        DATASET | {"probability": 0.25},
        DATASET | {"repeats": 4, "probability": 0.5},
        DATASET | {"repeats": 1, "probability": 1.5},
        DATASET | {"probability": 1.0},
    ]
    found = read(place, datasets, data_backend_sampling="auto-weighting")
    sources = found.nested()["data"]["sources"]
    assert [one.get("repeats") for one in sources] == [0.25, 2.5, 3, None]
    assert "repeats" not in read(place, datasets[:1]).nested()["data"]
    with pytest.raises(PipelineError, match="data_backend_sampling is uniform"):
        read(place, datasets, data_backend_sampling="uniform")
    read(place, datasets[:1], data_backend_sampling="uniform")


def test_lycoris_lokr_is_pefts(place: Path) -> None:
    """Whole factors are scaled by 1: alpha is the rank."""
    lokr = {
        "algo": "lokr", "linear_dim": 10000, "linear_alpha": 1, "factor": 12, "bypass_mode": True,
        "apply_preset": {"target_module": ["Attention"],
                         "module_algo_map": {"Attention": {"factor": 12}}},
    }  # fmt: skip
    (place / "lokr.json").write_text(json.dumps(lokr))
    own = {"lora_type": "lycoris", "lycoris_config": "lokr.json", "model_family": "sdxl"}
    found = read(place, **own).nested()
    assert "lora" not in found
    assert found["peft"] == {
        "peft_type": "LOKR", "r": 10000, "alpha": 10000, "decompose_factor": 12,
        "target_modules": ["to_k", "to_q", "to_v", "to_out.0"], "init_weights": "lycoris",
    }  # fmt: skip
    for change in ({"algo": "loha"}, {"apply_preset": {"target_module": ["FeedForward"]}}):
        (place / "lokr.json").write_text(json.dumps(lokr | change))
        with pytest.raises(PipelineError, match="lycoris_config"):
            read(place, **own)


QUANTO_EXCLUDED = {
    "qwen_image": (),
    "flux": ("*.norm", "*.norm1", "*.norm2", "*.norm2_context", "proj_out", "x_embedder",
             "norm_out", "context_embedder"),
    "sd3": ("*norm*", "*norm1_context*", "*norm_added_q*", "*norm_added_k*", "proj_out*",
            "*pos_embed*", "*patch_embedding*", "*ffn*", "*scale_shift_table*", "*norm_out*",
            "*context_embedder*", "*time_text_embed*", "*time_proj*", "*condition_embedder*"),
}  # fmt: skip
"""SimpleTuner's patterns, for names of whole modules (_quanto_model at bc8e6ab7)."""


@pytest.mark.parametrize(
    ("family", "precision"),
    [("qwen_image", "int2-quanto"), ("flux", "int8-quanto"), ("sd3", "int4-quanto")],
)
def test_a_base_of_quanto_has_its_layers(place: Path, family: str, precision: str) -> None:
    """Of a nano model the layers are left as they are that SimpleTuner's patterns leave."""
    found = read(place, base_model_precision=precision, model_family=family).values
    assert found["base_model_precision"] == precision
    entries = found.get("base_model_exclude_modules", [])
    architecture = find_architecture(family, "nano")
    model = build_part(architecture.trained, architecture.source)
    layers = [name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)]
    left = [layer for layer in layers if is_excluded(layer, entries)]
    assert left == [
        layer
        for layer in layers
        if any(fnmatchcase(layer, pattern) for pattern in QUANTO_EXCLUDED[family])
    ]
    assert not [one for one in entries if not any(is_excluded(layer, [one]) for layer in layers)]


def test_settings_of_the_web_interface(place: Path) -> None:
    """Wrapped, with dashes; a base by its flavour; a quantized base next to an adapter."""
    inner = {f"--{key}": value for key, value in USUAL.items()}
    del inner["--pretrained_model_name_or_path"]
    inner |= {"--base_model_precision": "int8-torchao", "--push_checkpoints_to_hub": False}
    (place / "sets.json").write_text(json.dumps([DATASET]))
    (place / "config.json").write_text(json.dumps({"_metadata": {}, "config": inner}))
    found = import_file(Path("config.json"), ImportOptions(presets=PRESETS))
    assert found.values["base"] == "black-forest-labs/FLUX.1-Krea-dev"
    assert "base_model_precision" in keys_of(found, "changed")


def test_the_parts_are_those_of_the_families() -> None:
    for name, parts in OTHER_PARTS.items():
        assert {*parts, "vae"} == load_family(name).spec.classes.keys()


def test_every_key_says_what_becomes_of_it() -> None:
    """Those that change nothing have a reason."""
    assert len(SIMPLETUNER) > 330
    assert all(key.reason for key in SIMPLETUNER.values() if key.fate != "mapped"
               and key.type != "section")  # fmt: skip


PLUGIN = {
    "distributed_type": "DEEPSPEED", "num_processes": 2, "mixed_precision": "bf16",
    "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 4,
                         "offload_optimizer_device": "cpu", "zero3_init_flag": False},
}  # fmt: skip


def test_accelerates_deepspeed_is_the_trainers(place: Path) -> None:
    """Its YAML launches SimpleTuner's and HF Trainer's commands; two configurations contradict."""
    (place / "ds.yaml").write_text(json.dumps(PLUGIN))
    start = "accelerate launch --config_file ds.yaml"
    own = f"{start} train.py --model_family sdxl --model_type full --train_batch_size 2"
    own += " --max_train_steps 9 --num_train_epochs 0 --pretrained_model_name_or_path a/b"
    text = f"{start} finetune.py --model_name_or_path a/b --max_steps 9 --bf16 true"
    text += " --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --data_path a.json"
    for command, schedule in ((own, "WarmupLR"), (text, "linear")):
        found = import_command(command, ImportOptions(presets=PRESETS)).nested()
        assert found["launch"]["preset"] == "zero2_offload"
        assert found["launch"]["num_processes"] == 2
        assert found["train"]["global_batch_size"] == 16
        assert found["train"]["lr_scheduler"] == schedule
    (place / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    with pytest.raises(PipelineError, match="turns DeepSpeed on as well"):
        import_command(f"{text} --deepspeed ds.json", ImportOptions(presets=PRESETS))


def test_simpletuner_train_reads_its_configuration(place: Path) -> None:
    """The one of an environment, too."""
    (place / "config" / "mine").mkdir(parents=True)
    (place / "config" / "mine" / "config.json").write_text(json.dumps({
        "model_family": "sd3", "model_type": "lora", "max_train_steps": 9, "num_train_epochs": 0,
    }))  # fmt: skip
    found = import_command("simpletuner train --env mine", ImportOptions(presets=PRESETS))
    assert found.values["family"] == "sd3"
    with pytest.raises(PipelineError, match=r"reads config/config.json, which is not there"):
        import_command("simpletuner train", ImportOptions(presets=PRESETS))


def test_a_phase_points_at_simpletuners_settings(place: Path) -> None:
    """Their DeepSpeed configuration is the launch; without one they name none."""
    block = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
    settings = {"model_family": "sdxl", "model_type": "full", "learning_rate": 1e-5}
    (place / "st.json").write_text(json.dumps({**settings, "deepspeed_config": block}))
    assert launch_from_file(Path("st.json"), presets=PRESETS)[0]["preset"] == "zero2"
    (place / "st.json").write_text(json.dumps(settings))
    with pytest.raises(PipelineError, match="without deepspeed_config say what is trained"):
        launch_from_file(Path("st.json"), presets=PRESETS)


def test_toml_is_read_as_json(tmp_path: Path) -> None:
    """SimpleTuner itself takes either."""
    (tmp_path / "sets.json").write_text(json.dumps([DATASET, EMBEDS]))
    (tmp_path / "config.json").write_text(json.dumps(USUAL))
    lines = [f"{name} = {json.dumps(value)}" for name, value in USUAL.items()]
    (tmp_path / "config.toml").write_text("\n".join(lines))
    from_json, from_toml = (
        import_file(tmp_path / name).values for name in ("config.json", "config.toml")
    )
    assert from_toml == from_json
    assert from_toml["family"] == "flux"
