"""The model card of exported weights: a README.md with a head for the hub.

https://huggingface.co/docs/hub/model-cards. All statements come from files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.artifact import Artifact
from zerotrain.evaluation.report_page import LABELS, format_metric
from zerotrain.export.formats import OWN_FOLDER
from zerotrain.export.formats.conditioning_code import default_files
from zerotrain.export.formats.loading_code import METHOD, TRUNCATE, is_raw, loading_code
from zerotrain.export.provenance import Origin
from zerotrain.launch.explain import launch_facts
from zerotrain.state.ran_on import RanOn, as_markdown

if TYPE_CHECKING:
    from zerotrain.evaluation.results import Answer
    from zerotrain.models.families import Family

GRID = "samples.png"

LOADING = {
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
"""Code that loads the formats that are not a whole folder, for image models; a test runs it."""
OWN_LOADING = {
    ("ldm", "sd3"): "ldm_denoiser",
    ("ldm", "flux"): "ldm_denoiser",
    ("kohya", "sd3"): "kohya_sd3",
}
"""Keys of LOADING for families whose format is loaded differently."""
LOADING_TEXT = {
    "peft": """\
from peft import PeftModel
from transformers import {model}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{base}")
model = PeftModel.from_pretrained({model}.from_pretrained("{base}"), "{repo}")
""",
    "single_file": LOADING["single_file"],
}
"""The same for language models."""
TASKS = {"causal_lm": "text-generation", "seq2seq_lm": "text2text-generation"}
"""The hub's names of the tasks of language models."""


def model_card(
    weights: Artifact,
    repo_id: str,
    origin: Origin,
    license: str | None,
    prompts: Sequence[str] = (),
    answers: Sequence[Answer] = (),
    systems: Sequence[str] = (),
) -> str:
    """Return the card's text.

    Args:
        weights: The exported folder.
        repo_id: OWNER/NAME of the repository.
        origin: Its base model and the phase that trained it.
        license: The licence's id on the hub, if it is known.
        prompts: Prompts of the rows of the sample grid; none without a grid.
        answers: Answers of a language model in its evaluation.
        systems: The system's turn before each answer; none if no answer has one.
    """
    from huggingface_hub import ModelCardData

    from zerotrain.models.families import load_family

    family: Any = load_family(weights.content["family"])
    text = family.modality == "text"
    form = format_of(weights, family)
    adapter = form in ("adapter", "method", "diffusers_lora", "kohya", "peft")
    head = ModelCardData(
        base_model=origin.hub_id,
        base_model_relation=("adapter" if adapter else "finetune") if origin.hub_id else None,
        library_name="peft" if form == "peft" else OWN_FOLDER[family.modality],
        license=license,
        pipeline_tag=TASKS.get(family.name) or _image_task(weights.folder),
        tags=[family.name, "zerotrain", *([_method(weights)] if adapter else [])],
    )
    if form in ("adapter", "method", OWN_FOLDER[family.modality]):
        loading = loading_code(
            weights.folder,
            family.name,
            prompts[0] if prompts else answers[0].prompt if answers else "a prompt",
            repo=repo_id,
            max_sequence_length=weights.content.get("max_sequence_length"),
            long_captions=weights.content.get("long_captions", TRUNCATE),
            raw=is_raw(weights.content),
            system=systems[0] if systems else None,
        )
    else:
        own = OWN_LOADING.get((form, family.name), form)
        loading = (LOADING_TEXT if text else LOADING)[own].format(
            repo=repo_id,
            base=origin.hub_id or "BASE",
            pipeline=getattr(family, "pipeline", ""),
            model=family.classes[family.trained_part],
            part=family.trained_part,
        )
    made = weights.made_by
    facts = [
        ("family", family.name),
        ("base model", origin.hub_id or ""),
        ("format", weights.content.get("to", OWN_FOLDER[family.modality])),
        ("type", weights.content["dtype"]),
        ("weights", "averaged (EMA)" if weights.content.get("ema") else ""),
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
    if answers:
        asked = [(a.prompt, a.expected or "", a.generated) for a in answers]
        parts.append("## Answers\n\n" + _table(asked, ("prompt", "expected", "generated")))
    parts.append(f"## How to load it\n\n```python\n{loading}```")
    if trained_on := as_markdown(RanOn.of_manifest(made, weights.content["step"])):
        parts.append(trained_on.rstrip("\n"))
    if origin.phase is not None:
        metrics = json.loads((origin.phase / "metrics.json").read_text())
        parts.append("## Metrics\n\n" + _table(_metrics(metrics)))
        launch = launch_facts(origin.phase / "launch" / "run.yaml")
        if launch:
            values = _table((name, value) for name, value, _ in launch)
            parts.append(f"## Training values of the last phase\n\n{values}")
    return "\n\n".join(parts) + "\n"


def format_of(weights: Artifact, family: Family) -> str:
    """Return the format of a folder, a key of LOADING or LOADING_TEXT."""
    from zerotrain.models.families.lora import adapter_file

    if weights.kind == "weights":
        file, _ = adapter_file(family.trained_part)
        if METHOD in weights.files:
            return "method"
        return "adapter" if file in weights.files else OWN_FOLDER[family.modality]
    return str(weights.content["to"])


def _method(weights: Artifact) -> str:
    """Return the adapter's method from its configuration, in lower case: lora, loha."""
    from zerotrain.models.families.lora import PEFT_CONFIG

    for name in (METHOD, PEFT_CONFIG):
        if name in weights.files:
            return str(json.loads(weights.path(name).read_text())["peft_type"]).lower()
    return "lora"


def _image_task(folder: Path) -> str:
    """Return the hub's name of an image model's task."""
    return "image-to-image" if default_files(folder) else "text-to-image"


def _metrics(metrics: dict[str, Any]) -> Iterable[tuple[str, str]]:
    names = [*(n for n in LABELS if n in metrics), *sorted(metrics.keys() - LABELS.keys())]
    return [(LABELS.get(name, name), format_metric(name, metrics[name])) for name in names]


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = ("", "")) -> str:
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines])


def _cell(text: str) -> str:
    """Escape text so that it stays in its cell and is not read as markup."""
    return escape(text, quote=False).replace("|", "&#124;").replace("\n", "<br>")
