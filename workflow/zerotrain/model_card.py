"""The model card of exported weights: a README.md whose head the hub reads.

https://huggingface.co/docs/hub/model-cards. Nothing is claimed that no file says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.errors import PipelineError
from zerotrain.launch.facts import launch_facts
from zerotrain.page import LABELS, shown

GRID = "samples.png"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

LOADING = {
    "diffusers": """\
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{repo}")
""",
    "adapter": """\
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{repo}")
pipeline.load_lora_weights("{repo}")
""",
    "ldm": """\
from diffusers import {pipeline}
from huggingface_hub import snapshot_download

folder = snapshot_download("{repo}")
pipeline = {pipeline}.from_single_file(
    f"{{folder}}/model.safetensors", config=f"{{folder}}/config"
)
""",
    "ldm_denoiser": """\
from diffusers import {model}, {pipeline}
from huggingface_hub import hf_hub_download

file = hf_hub_download("{repo}", "model.safetensors")
{part} = {model}.from_single_file(file, config="{base}", subfolder="{part}")
pipeline = {pipeline}.from_pretrained("{base}", {part}={part})
""",
    "kohya_sd3": """\
# diffusers reads no LoRA of SD3 with kohya's names: open lora.safetensors in ComfyUI or Forge
""",
    "diffusers_lora": """\
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{base}")
pipeline.load_lora_weights("{repo}")
""",
    "kohya": """\
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{base}")
pipeline.load_lora_weights("{repo}", weight_name="lora.safetensors")
""",
    "peft": """\
from diffusers import {model}
from peft import PeftModel

model = {model}.from_pretrained("{base}", subfolder="{part}")
model = PeftModel.from_pretrained(model, "{repo}")
""",
    "single_file": """\
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file

tensors = load_file(hf_hub_download("{repo}", "model.safetensors"))
""",
}
"""How each format is loaded; tests run them."""
OWN_LOADING = {
    ("ldm", "sd3"): "ldm_denoiser",
    ("ldm", "flux"): "ldm_denoiser",
    ("kohya", "sd3"): "kohya_sd3",
}
"""Families of which a format is loaded otherwise."""


@dataclass(frozen=True)
class Origin:
    """What the folders that weights came from say of them, as far as they are still there."""

    base: str | None
    """Hub id or folder of the base model, as the configuration named it."""
    phase: Path | None
    """The phase's folder, with metrics.json, evaluation/ and launch/."""


def origin_of(weights: Artifact) -> Origin:
    """Follow an exported folder to the phase and the base that it came from."""
    while "weights" in weights.parents:
        above = _parent(weights, "weights")
        if above is None:
            return Origin(None, None)
        weights = above
    base, checkpoint = _parent(weights, "base"), weights.parents.get("checkpoint")
    phase = Path(checkpoint["path"]).parent if checkpoint else None
    return Origin(
        base=str(base.content["base"]) if base and "base" in base.content else None,
        phase=phase if phase and (phase / "metrics.json").is_file() else None,
    )


def model_card(
    weights: Artifact, repo_id: str, origin: Origin, license: str | None, prompts: Sequence[str]
) -> str:
    """The card's text.

    Args:
        weights: The exported folder.
        repo_id: OWNER/NAME of the repository.
        origin: Where it came from.
        license: The licence's id on the hub, if it is known.
        prompts: Rows of the grid of samples; none where there is no grid.
    """
    from huggingface_hub import ModelCardData

    from zerotrain.families import load_family

    family: Any = load_family(weights.content["family"])
    form = format_of(weights)
    adapter = form in ("adapter", "diffusers_lora", "kohya", "peft")
    on_hub = bool(origin.base and HUB_ID.fullmatch(origin.base) and not Path(origin.base).exists())
    head = ModelCardData(
        base_model=origin.base if on_hub else None,
        base_model_relation=("adapter" if adapter else "finetune") if on_hub else None,
        library_name="peft" if form == "peft" else "diffusers",
        license=license,
        pipeline_tag="text-to-image",
        tags=[family.name, "zerotrain", *(["lora"] if adapter else [])],
    )
    own = OWN_LOADING.get((form, family.name), form)
    loading = LOADING[own].format(
        repo=repo_id,
        base=origin.base or "BASE",
        pipeline=family.pipeline,
        model=family.classes[family.trained_part],
        part=family.trained_part,
    )
    made = weights.made_by
    facts = [
        ("family", family.name),
        ("base model", origin.base or ""),
        ("format", weights.content.get("to", "diffusers")),
        ("type", weights.content["dtype"]),
        ("run", "/".join(str(made[key]) for key in ("run", "phase") if made.get(key))),
        ("steps", str(weights.content["step"])),
        ("sha256 of the weights' manifest", weights.identity),
    ]
    parts = [
        f"---\n{head.to_yaml()}\n---\n\n# {repo_id.split('/')[-1]}",
        _table((name, value) for name, value in facts if value),
    ]
    if prompts:
        rows = "\n".join(f"- {prompt}" for prompt in prompts)
        parts.append(f"![Samples, a row for each prompt]({GRID})\n\n{rows}")
    parts.append(f"## How to load it\n\n```python\n{loading}```")
    if origin.phase is not None:
        metrics = json.loads((origin.phase / "metrics.json").read_text())
        parts.append("## Metrics\n\n" + _table(_metrics(metrics)))
        launch = launch_facts(origin.phase / "launch" / "run.yaml")
        if launch:
            values = _table((name, value) for name, value, _ in launch)
            parts.append(f"## Training values of the last phase\n\n{values}")
    return "\n\n".join(parts) + "\n"


def format_of(weights: Artifact) -> str:
    """The format of a folder, a key of LOADING."""
    from zerotrain.families.lora import ADAPTER

    if weights.kind == "weights":
        return "adapter" if ADAPTER in weights.files else "diffusers"
    return str(weights.content["to"])


def _parent(weights: Artifact, name: str) -> Artifact | None:
    """A parent that still lies where it lay, and is the same."""
    said = weights.parents.get(name)
    if said is None:
        return None
    try:
        found = artifact.read(Path(said["path"]), name, verify=False)
    except PipelineError:
        return None
    return found if found.identity == said["identity"] else None


def _metrics(metrics: dict[str, Any]) -> Iterable[tuple[str, str]]:
    names = [*(n for n in LABELS if n in metrics), *sorted(metrics.keys() - LABELS.keys())]
    return [(LABELS.get(name, name), shown(name, metrics[name])) for name in names]


def _table(rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {name} | {value.replace('|', '&#124;')} |" for name, value in rows]
    return "\n".join(["| | |", "|---|---|", *lines])
