"""What the programs train by in each of their own cases, written by hand from their code.

Sources, at the commits of benchmarks/import_cases.py. SimpleTuner: helpers/training/
optimizer_param.py, helpers/models/*/model.py and the field registry's defaults. DiffSynth-Studio:
diffsynth/diffusion/{runner,flow_match,loss}.py and the pipelines. diffusers: the scripts' parsers
and LoraConfig. The golden files hold what we make of a case; this table holds what is right.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from zerotrain.config.families import FAMILIES
from zerotrain.config.read import parse_config
from zerotrain.config.run import RunConfig
from zerotrain.importers.imported_config import ImportedConfig

sys.path.append(str(Path(__file__).parents[2]))  # `pytest` alone does not find the benchmarks
from benchmarks.import_cases import PEERS, Outcome, read_facts, run

ATTENTION = {"to_q", "to_k", "to_v", "to_out.0"}
ADDED = {"add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}
JOINT_ENDS = ATTENTION | ADDED
JOINT = {f"attn.{name}" for name in JOINT_ENDS}
FFS = {"ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"}
QWEN = ATTENTION | ADDED | {"img_mlp.net.2", "img_mod.1", "txt_mlp.net.2", "txt_mod.1"}

SDXL_LOSS = {"loss": "l2", "snr_gamma": None, "noise_offset": 0.0}
FULL = {"adapter": None, "targets": None}

SIMPLETUNER = {
    "optimizer": ("adamw", 0.9, 0.999, 1e-6, 0.01, {}),
    "schedule": ("constant", 0, {}),
    "clipping": ("value", 2.0),
    "dropout": 0.1,
    "ema": False,
    "precision": "bf16",
    "repeats": 1,
    "lr": 1e-4,
    "until": "100 steps",
    "batch": 1,
}
ST_FLOW = {"loss": "l2", "scheme": ("logit_normal", 0.0, 1.0), "shift": 3.0}

DIFFSYNTH = {
    "optimizer": ("adamw", 0.9, 0.999, 1e-8, 0.01, {}),
    "schedule": ("constant", 0, {}),
    "dropout": 0.0,
    "ema": False,
    "resolution": 1024,
}
DS_QWEN = DIFFSYNTH | {
    "loss": "l2", "scheme": ("gaussian",), "shift": 2.2255, "length": 1024, "repeats": 50,
    "precision": "bf16",
}  # fmt: skip
DS_QWEN_FULL = DS_QWEN | FULL | {
    "lr": 1e-5, "until": "2 epochs", "batch": 8, "clipping": ("norm", 1.0),
}  # fmt: skip
DS_QWEN_LORA = DS_QWEN | {
    "lr": 1e-4, "until": "5 epochs", "batch": 1, "clipping": ("norm", 0.0),
    "adapter": (32, 32, 0.0, "default"), "targets": QWEN,
}  # fmt: skip
DS_FLUX_FULL = DIFFSYNTH | FULL | {
    "loss": "l2", "scheme": ("gaussian",), "shift": 3.0, "length": 512, "guidance": 1.0,
    "repeats": 400, "lr": 1e-5, "until": "1 epochs", "batch": 8, "clipping": ("norm", 1.0),
    "precision": "bf16",
}  # fmt: skip
DS_FLUX_LORA = DS_FLUX_FULL | {
    "repeats": 50, "lr": 1e-4, "until": "5 epochs", "batch": 1, "clipping": ("norm", 0.0),
    "adapter": (32, 32, 0.0, "default"), "fused": True,
    "targets": JOINT_ENDS | FFS | {"proj_mlp", "norm.linear", "norm1.linear",
    "norm1_context.linear"} | {f"single_transformer_blocks.{n}.proj_out" for n in range(38)},
}  # fmt: skip
ST_FLUX_INT8 = ("int8-quanto", {"^proj_out", "x_embedder", "context_embedder"})
FILL = {"columns": ["flux_fill_image", "flux_fill_mask"], "repeats": 200}
REDUX = {"columns": ["flux_redux_image"], "dropout": 1.0}
EDITING = (
    *("Qwen-Image-Edit", "Qwen-Image-Edit-2509", "Qwen-Image-Edit-2511"),
    *("FireRed-Image-Edit-1.0", "FireRed-Image-Edit-1.1"),
)
DS_SDXL = DIFFSYNTH | SDXL_LOSS | {
    "length": None, "repeats": 10, "batch": 1, "clipping": ("norm", 0.0), "precision": "no",
}  # fmt: skip

DREAMBOOTH = {
    "optimizer": ("adamw", 0.9, 0.999, 1e-8, 1e-4, {}),
    "schedule": ("constant", 0, {}),
    "clipping": ("norm", 1.0),
    "dropout": 0.0,
    "ema": False,
    "repeats": 1,
    "until": "500 steps",
    "batch": 4,
    "lr": 1e-4,
    "resolution": 1024,
}
PRODIGY = ("prodigy", 0.9, 0.999, 1e-8, 1e-4,
           {"use_bias_correction": True, "safeguard_warmup": True})  # fmt: skip
DB_FLUX = DREAMBOOTH | {
    "loss": "l2", "scheme": ("none",), "shift": 1.0, "guidance": 1.0, "precision": "bf16",
}  # fmt: skip
DB_SD3 = DREAMBOOTH | {
    "loss": "l2", "scheme": ("logit_normal", 0.0, 1.0), "shift": None, "preconditioned": True,
    "length": 77, "precision": "fp16",
}  # fmt: skip
T2I_SDXL = DREAMBOOTH | SDXL_LOSS | {
    "optimizer": ("adamw", 0.9, 0.999, 1e-8, 1e-2, {}), "length": None, "precision": "fp16",
}  # fmt: skip
RANK_4 = {"adapter": (4, 4, 0.0, "gaussian")}

ST, DS = "simpletuner/examples", "examples"
QWEN_AT, FLUX_AT = f"{DS}/qwen_image/model_training", f"{DS}/flux/model_training"
SDXL_AT, SDXL_SH = f"{DS}/stable_diffusion_xl/model_training", "stable-diffusion-xl-base-1.0.sh"
EXPECTED: dict[str, dict[str, Any]] = {
    f"{ST}/default.json": SIMPLETUNER | ST_FLOW | {
        "until": "1000 steps", "schedule": ("constant_with_warmup", 0, {}), "resolution": 1024,
        "length": 512, "guidance": 1.0, "adapter": (16, 16, 0.1, "default"),
        "targets": ATTENTION | ADDED,
    },
    f"{ST}/flux.peft-lora/config.json": SIMPLETUNER | ST_FLOW | {
        "resolution": 512, "length": 512, "guidance": 1.0, "adapter": (16, 16, 0.1, "default"),
        "targets": ATTENTION | ADDED, "quantized": ST_FLUX_INT8,
    },
    f"{ST}/flux.peft-lora+TREAD/config.json": SIMPLETUNER | ST_FLOW | {
        "resolution": 512, "length": 512, "guidance": 1.0, "adapter": (16, 16, 0.1, "default"),
        "targets": ATTENTION | ADDED, "routes": [(0.5, 2, -2)],
        "quantized": ST_FLUX_INT8,
    },
    f"{ST}/qwen_image.peft-lora/config.json": SIMPLETUNER | ST_FLOW | {
        # Its betas are in optimizer_args where they are not Lion's own, 0.9 and 0.99.
        "optimizer": ("lion", 0.9, 0.999, 1e-8, 0.0, {}), "clipping": ("value", 0.01),
        "schedule": ("constant_with_warmup", 10, {}), "shift": 1.73, "dropout": 0.0,
        "resolution": 1024, "length": 1024, "adapter": (8, 8, 0.1, "default"),
        "targets": ATTENTION, "quantized": ("int2-quanto", set()),
    },
    f"{ST}/sd3.peft-lora/config.json": SIMPLETUNER | ST_FLOW | {
        "resolution": 1024, "length": 154, "batch": 3, "adapter": (128, 128, 0.1, "default"),
        "targets": ATTENTION, "preconditioned": False,
    },
    f"{ST}/sdxl.lycoris-lokr/config.json": SIMPLETUNER | SDXL_LOSS | {
        "resolution": 1024, "length": None, "lr": 3e-7, "loss": ("huber", 0.1, "snr"),
        "adapter": ("LOKR", 12), "targets": ATTENTION,
    },
    **dict.fromkeys(
        [f"{FLUX_AT}/full/FLUX.1-Krea-dev.sh", f"{FLUX_AT}/full/FLUX.1-dev.sh",
         f"{FLUX_AT}/special/npu_training/FLUX.1-dev-NPU.sh"],
        DS_FLUX_FULL,
    ),
    **dict.fromkeys(
        [f"{FLUX_AT}/lora/{name}.sh"
         for name in ("FLEX.2-preview", "FLUX.1-Krea-dev", "FLUX.1-dev")],
        DS_FLUX_LORA,
    ),
    **dict.fromkeys(
        [f"{QWEN_AT}/full/{name}.sh"
         for name in ("Qwen-Image", "Qwen-Image-2512", "Qwen-Image-Distill-Full")],
        DS_QWEN_FULL,
    ),
    **dict.fromkeys(
        [*(f"{QWEN_AT}/lora/{name}.sh"
           for name in ("Qwen-Image", "Qwen-Image-2512", "Qwen-Image-Distill-Full")),
         f"{QWEN_AT}/special/fp8_training/Qwen-Image-LoRA.sh",
         f"{QWEN_AT}/special/npu_training/Qwen-Image-LoRA-NPU.sh",
         f"{QWEN_AT}/special/npu_training/Qwen-Image-Edit-2509-LoRA-NPU.sh",
         f"{QWEN_AT}/special/split_training/Qwen-Image-LoRA.sh"],
        DS_QWEN_LORA,
    ),
    **dict.fromkeys(
        [*(f"{QWEN_AT}/full/{name}.sh" for name in EDITING),
         f"{QWEN_AT}/special/npu_training/Qwen-Image-Edit-2509-NPU.sh"],
        DS_QWEN_FULL | {"columns": ["edit_image"]},
    ),
    **dict.fromkeys(
        [f"{QWEN_AT}/lora/{name}.sh" for name in EDITING],
        DS_QWEN_LORA | {"columns": ["edit_image"]},
    ),
    f"{QWEN_AT}/lora/Qwen-Image-In-Context-Control-Union.sh": DS_QWEN_LORA | {
        "columns": ["context_image"], "adapter": (64, 64, 0.0, "default"),
        "start": "models/DiffSynth-Studio/Qwen-Image-In-Context-Control-Union/model.safetensors",
    },
    **dict.fromkeys(
        [f"{FLUX_AT}/full/FLUX.1-Kontext-dev.sh",
         f"{FLUX_AT}/special/npu_training/FLUX.1-Kontext-dev-NPU.sh"],
        DS_FLUX_FULL | {"columns": ["kontext_images"]},
    ),
    f"{FLUX_AT}/full/FLEX.2-preview.sh": DS_FLUX_FULL | {"repeats": 200},
    f"{FLUX_AT}/lora/FLUX.1-Kontext-dev.sh": DS_FLUX_LORA | {
        "columns": ["kontext_images"], "repeats": 400,
    },
    # No launch file: one process. Zeros are read in place of captions.
    f"{FLUX_AT}/full/FLUX.1-Redux-dev.sh": DS_FLUX_FULL | REDUX | {
        "repeats": 1, "batch": 1, "clipping": ("norm", 0.0),
    },
    f"{FLUX_AT}/lora/FLUX.1-Redux-dev.sh": DS_FLUX_LORA | REDUX | {"repeats": 200},
    # Its script names no launch file: one process.
    f"{FLUX_AT}/full/FLUX.1-Fill-dev.sh": DS_FLUX_FULL | FILL | {
        "batch": 1, "clipping": ("norm", 0.0),
    },
    f"{FLUX_AT}/lora/FLUX.1-Fill-dev.sh": DS_FLUX_LORA | FILL,
    # Both trainings of the script.
    f"{QWEN_AT}/special/differential_training/Qwen-Image-LoRA.sh": DS_QWEN_LORA,
    f"{QWEN_AT}/special/quant_training/Qwen-Image-2512-bitsandbytes_nf4.sh": DS_QWEN_LORA | {
        "quantized": ("nf4", {"img_mod.1", "txt_mod.1", "norm_out.linear", "img_in", "txt_in",
                              "proj_out", "timestep_embedder.linear_1",
                              "timestep_embedder.linear_2"}),
    },
    # accelerate fills the file's "auto" of gradient_clipping with 1.0.
    f"{QWEN_AT}/special/low_vram_training/Qwen-Image-LoRA.sh": DS_QWEN_LORA | {
        "clipping": ("norm", 1.0),
    },
    f"{SDXL_AT}/full/{SDXL_SH}": DS_SDXL | FULL | {"lr": 1e-5, "until": "2 epochs"},
    f"{SDXL_AT}/lora/{SDXL_SH}": DS_SDXL | {
        "lr": 1e-4, "until": "5 epochs", "adapter": (32, 32, 0.0, "default"), "targets": 722,
    },
    "examples/dreambooth/README_flux.md#1": DB_FLUX | FULL | {
        "optimizer": PRODIGY, "lr": 1.0, "length": 77,
    },
    "examples/dreambooth/README_flux.md#2": DB_FLUX | RANK_4 | {
        "optimizer": PRODIGY, "lr": 1.0, "length": 512, "resolution": 512, "targets": JOINT | FFS,
    },
    "examples/dreambooth/README_flux.md#4": DB_FLUX | RANK_4 | {
        "optimizer": ("adamw8bit", 0.9, 0.999, 1e-8, 1e-4, {}), "length": 512,
        "targets": JOINT | FFS | {"proj_mlp"},
    },
    "examples/dreambooth/README_flux.md#5": DB_FLUX | {
        "optimizer": ("adamw8bit", 0.9, 0.999, 1e-8, 1e-4, {}), "length": 512,
        "until": "1000 steps", "adapter": (16, 4, 0.0, "gaussian"), "columns": ["file_name"],
        "targets": JOINT | FFS | {"proj_mlp"},
    },
    "examples/dreambooth/README_qwen.md#1": DREAMBOOTH | RANK_4 | {
        "optimizer": ("adamw8bit", 0.9, 0.999, 1e-8, 1e-4, {}), "lr": 2e-4, "length": 512,
        "loss": "l2", "scheme": ("none",), "shift": 1.0, "precision": "bf16", "targets": ATTENTION,
    },
    "examples/dreambooth/README_sd3.md#1": DB_SD3 | FULL,
    "examples/dreambooth/README_sd3.md#2": DB_SD3 | RANK_4 | {
        "lr": 4e-4, "resolution": 512, "targets": JOINT,
    },
    "examples/dreambooth/README_sdxl.md#1": DREAMBOOTH | SDXL_LOSS | RANK_4 | {
        "length": None, "precision": "fp16", "targets": ATTENTION,
    },
    "examples/text_to_image/README_sdxl.md#1": T2I_SDXL | FULL | {
        "optimizer": ("adamw8bit", 0.9, 0.999, 1e-8, 1e-2, {}), "lr": 1e-6, "resolution": 512,
        "until": "10000 steps", "dropout": 0.2,
    },
    "examples/text_to_image/README_sdxl.md#2": T2I_SDXL | RANK_4 | {
        "until": "2 epochs", "batch": 1, "targets": ATTENTION,
    },
    "examples/text_to_image/README_sdxl.md#3": T2I_SDXL | RANK_4 | {
        "until": "20 steps", "batch": 1, "targets": ATTENTION,
    },
}  # fmt: skip
"""Each counted case. A shift of None is that of the base's scheduler, a length of None CLIP's own;
`targets` may be their number: SDXL has 10 in each of 70 blocks, and 2 around each of 11 stacks."""


@cache
def outcomes() -> dict[str, Outcome]:
    """Every case of every program, imported."""
    return {case.path: run(case) for peer in PEERS for case in read_facts(peer)}


def parsed(imported: ImportedConfig) -> RunConfig:
    """The configuration with all defaults, for images that are not looked at."""
    found = imported.nested()
    data = found.get("data", {})
    place = {} if "path" in data else {"images": "-"}
    return parse_config({**found, "data": {**data, **place}}, "case")


def adapter_of(config: RunConfig) -> dict[str, Any]:
    """Rank, alpha, dropout and first values; of LoKr its kind and factor."""
    if config.lora is not None:
        own = config.lora
        alpha = own.rank if own.alpha is None else own.alpha
        numbers = (own.rank, alpha, own.dropout, own.init_lora_weights)
        fused = {"fused": True} if own.fused_layers else {}
        return {"adapter": numbers, "targets": own.target_modules, **fused}
    if config.peft is not None:
        peft = dict(config.peft)
        kind = (peft["peft_type"], peft["decompose_factor"])
        return {"adapter": kind, "targets": peft["target_modules"]}
    return FULL


def quantization_of(config: RunConfig) -> dict[str, Any]:
    """How the base is kept, where that is not in the type of the training."""
    if config.base_model_precision == "no_change":
        return {}
    return {"quantized": (config.base_model_precision, {*config.base_model_exclude_modules})}


def loss_of(config: RunConfig) -> dict[str, Any]:
    """The loss, what weighs it, and which timesteps are drawn."""
    family = config.family
    own = config.phases[0].train.objective(family)
    loss = own.get("loss_type", "l2")
    found: dict[str, Any] = {
        "loss": loss if loss == "l2" else (loss, own["huber_c"], own["huber_schedule"])
    }
    if family == "sdxl":
        return found | {key: own[key] for key in ("snr_gamma", "noise_offset")}
    scheme = own["weighting_scheme"] or FAMILIES[family].weighting_scheme
    numbers = (own["logit_mean"], own["logit_std"]) if scheme == "logit_normal" else ()
    found |= {"scheme": (scheme, *numbers), "shift": own["flow_shift"]}
    if family == "sd3":
        found["preconditioned"] = own.get("precondition_outputs", False)
    if family == "flux":
        found["guidance"] = own["flux_guidance_value"]
    return found


def conditioning_of(config: RunConfig) -> dict[str, Any]:
    """The columns of conditioning images, and the file that the weights begin with."""
    resume = config.resume_from_checkpoint
    found = {"columns": config.data.conditioning_columns, "start": resume and resume.folder}
    return {name: value for name, value in found.items() if value}


def routes_of(config: RunConfig) -> dict[str, Any]:
    """Share, first and last layer of each token route, where there are some."""
    tread = config.phases[0].train.tread_config
    if tread is None:
        return {}
    routes = [(r.selection_ratio, r.start_layer_idx, r.end_layer_idx) for r in tread.routes]
    return {"routes": routes}


def values_of(config: RunConfig) -> dict[str, Any]:
    """All that the table says."""
    phase = config.phases[0]
    train = phase.train
    return {
        "lr": train.learning_rate,
        "optimizer": (train.optimizer, train.adam_beta1, train.adam_beta2, train.adam_epsilon,
                      train.adam_weight_decay, dict(train.optimizer_args)),
        "schedule": (train.lr_scheduler, train.lr_warmup_steps, dict(train.lr_scheduler_args)),
        "batch": train.global_batch_size,
        "until": phase.until,
        "repeats": config.data.repeats,
        "resolution": train.resolution,
        "dropout": train.caption_dropout_probability,
        "length": config.cache.max_sequence_length,
        "precision": phase.launch.mixed_precision,
        "clipping": (train.grad_clip_method, train.max_grad_norm),
        "ema": train.use_ema,
        **conditioning_of(config),
        **quantization_of(config),
        **adapter_of(config),
        **loss_of(config),
        **routes_of(config),
    }  # fmt: skip


def test_every_counted_case_is_in_the_table() -> None:
    """A case that begins to be imported needs its numbers from its program's code."""
    assert {path for path, found in outcomes().items() if found.imported} == set(EXPECTED)


@pytest.mark.parametrize("path", EXPECTED)
def test_a_case_has_the_numbers_of_its_program(path: str) -> None:
    """Optimizer, schedule, batch, end, adapter, loss, timesteps, dropout, lengths, precision."""
    expected, imported = EXPECTED[path], outcomes()[path].imported
    assert imported is not None
    for one in filter(None, (imported.before, imported)):
        found = values_of(parsed(one))
        targets = found["targets"]
        if isinstance(expected["targets"], int):
            found["targets"] = len(targets)
        elif targets is not None:
            found["targets"] = set(targets)
        assert found == expected
