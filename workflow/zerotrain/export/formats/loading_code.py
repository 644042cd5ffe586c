"""Python code that loads and uses a weights folder, for report, README and card.

Its results equal those of `zerotrain sample` and `zerotrain generate` for the same prompt with
their defaults, also with an adapter of any method; a test runs it. No library is imported here.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerotrain.config.data import ALPACA
from zerotrain.config.families import FAMILIES
from zerotrain.data.alpaca import alpaca_text
from zerotrain.export.formats.conditioning_code import (
    ConditioningCode,
    conditioning_code,
    default_files,
)
from zerotrain.state.ran_on import RanOn, as_markdown

STEPS, SEED, MAX_NEW_TOKENS = 30, 0, 256
"""Defaults of `zerotrain sample` and `zerotrain generate`."""
TRUNCATE, CHUNK = "truncate", "chunk"
"""Values of train.long_captions; see zerotrain.models.families.prompt_tokens."""
LORA = "pytorch_lora_weights.safetensors"
METHOD = "adapter/adapter_config.json"
"""The configuration of an adapter other than a LoRA, in a weights folder."""
PROMPT_TOKENS: Mapping[str, tuple[str, int]] = {
    "sd3": ("tokenizer_3", 256),
    "flux": ("tokenizer_2", 512),
    "qwen_image": ("tokenizer", 512),
}
"""The tokenizer that max_sequence_length applies to, and the pipeline's own default."""
PENALTIES: Mapping[str, Any] = {
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    **dict.fromkeys(
        ("min_new_tokens", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
         "forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "penalty_alpha",
         "exponential_decay_length_penalty", "guidance_scale")
    ),
}  # fmt: skip
"""Keys of a generation config that change a greedy answer, with their neutral values."""
DEVICE = """\
found = torch.accelerator.current_accelerator(check_available=True)
device = found.type if found and found.type in ("cuda", "npu", "mps") else "cpu"
dtype = torch.float32 if device == "cpu" else torch.bfloat16
"""
OFFLOAD = "# use pipeline.enable_model_cpu_offload() if this runs out of memory"
FIRST_CHUNK = """\
# diffusers reads the first 75 tokens of a prompt; the training and `zerotrain sample` read all
"""
GREEDY = """\
own = model.generation_config
model.generation_config = GenerationConfig(  # without the penalties and beams of the base
    eos_token_id=own.eos_token_id,
    pad_token_id=own.pad_token_id,
    decoder_start_token_id=getattr(model.config, "decoder_start_token_id", None),
)
"""


def loading_code(
    folder: Path,
    family: str,
    prompt: str,
    *,
    at: str | None = None,
    repo: str | None = None,
    resolution: int | None = None,
    max_sequence_length: int | None = None,
    long_captions: str = TRUNCATE,
    raw: bool = False,
    system: str | None = None,
    images: Sequence[str] | None = None,
) -> str:
    """Return Python code that loads a whole weights folder, with its adapter, and runs a prompt.

    Args:
        folder: The folder, in the layout of diffusers or transformers.
        family: The family's name.
        prompt: The prompt.
        at: The folder's name in the code; default: its path.
        repo: The hub's repository with its files, if the code is to load them from there.
        resolution: Side of the image in pixels; default: the model's own.
        max_sequence_length: Tokens of a prompt in training, from its manifest.
        long_captions: How training read captions too long for the text encoders, likewise.
        raw: Whether a language model reads the prompt as it is, without a chat template or a line
            break after it, as with `zerotrain generate --raw`.
        system: The system's turn before the prompt of a language model.
        images: Files of the prompt's conditioning images; default: names for as many as the
            pipeline of the folder takes at least.
    """
    at = at or folder.as_posix()
    if FAMILIES[family].modality == "text":
        return _text_code(folder, family, prompt, at, repo, raw=raw, system=system)
    files = default_files(folder) if images is None else images
    source, _ = _places(at, repo, download=(folder / METHOD).is_file())
    given = conditioning_code(folder, files, source, resolution, hub=bool(repo))
    arguments: dict[str, Any] = dict(given.arguments)
    arguments |= {"height": resolution, "width": resolution} if resolution else {}
    arguments |= {"num_inference_steps": STEPS, "generator": "seed"}
    length = _prompt_tokens(folder, family, max_sequence_length)
    reading = {"max_sequence_length": length} if length else {}
    if not given.encoded:
        arguments |= reading
    if family == "qwen_image":
        arguments["negative_prompt"] = '""'
    chunk = long_captions != TRUNCATE
    return _image_code(folder, family, prompt, at, repo, arguments, reading, given, chunk=chunk)


def text_of_readme(
    folder: Path, content: Mapping[str, Any], made_by: Mapping[str, Any] | None = None
) -> str:
    """Return the README.md of a weights folder; its code runs inside the folder.

    Args:
        folder: The folder, with its other files.
        content: The content of its manifest.
        made_by: `made_by` of its manifest, for facts on the training.
    """
    resolution = content.get("resolution")
    family, raw = content["family"], is_raw(content)
    if FAMILIES[family].modality == "image":
        prompt, command, made = "a prompt like your captions", "sample", "image"
    else:
        prompt = alpaca_text("a question") if raw else "a question"
        command, made = "generate", "answer"
    code = loading_code(
        folder,
        family,
        prompt,
        at=".",
        resolution=resolution,
        max_sequence_length=content.get("max_sequence_length"),
        long_captions=content.get("long_captions", TRUNCATE),
        raw=raw,
    )
    options = ["--raw"] if raw else []
    if made == "image":
        options += [word for file in default_files(folder) for word in ("--image", file)]
        options += ["--resolution", str(resolution)] if resolution else []
    line = shlex.join(["zerotrain", command, ".", prompt, *options])
    trained_on = as_markdown(RanOn.of_manifest(made_by or {}, content.get("step", 0)))
    return (
        "# How to load these weights\n\n"
        "The code runs inside this folder; outside, put the folder's path in place of `.`.\n\n"
        f"```python\n{code}```\n\n"
        f"The same {made} from the command line:\n\n```sh\n{line}\n```\n"
        + (f"\n{trained_on}" if trained_on else "")
    )


def is_raw(content: Mapping[str, Any]) -> bool:
    """Return whether weights were trained on prompts without chat template and line break.

    Args:
        content: The content of the weights' manifest.
    """
    return content.get("prompt_template") == ALPACA


def _image_code(
    folder: Path,
    family: str,
    prompt: str,
    at: str,
    repo: str | None,
    arguments: Mapping[str, Any],
    reading: Mapping[str, int],
    given: ConditioningCode,
    *,
    chunk: bool,
) -> str:
    part = FAMILIES[family].trained_part
    method, lora = (folder / METHOD).is_file(), (folder / LORA).is_file()
    imports = ["import torch", *(given.imports or ["from diffusers import DiffusionPipeline"])]
    imports += ["from huggingface_hub import snapshot_download"] if method and repo else []
    imports += ["from peft import PeftModel"] if method else []
    # Readers of the hub do not have zerotrain; diffusers reads only the first 75 tokens.
    first_chunk = chunk and bool(repo)
    chunk = chunk and not repo
    imports += [f"from zerotrain.models.families.{family} import FAMILY"] if chunk else []
    source, adapter = _places(at, repo, download=method)
    loading = {"dtype": "dtype", **dict.fromkeys(_absent_encoders(folder), "None"), **given.loading}
    if family == "sdxl":
        loading["add_watermarker"] = "False"
    lines = [f'folder = snapshot_download("{repo}")'] if method and repo else []
    lines += given.before.splitlines()
    lines += [f"pipeline = {_call(f'{given.pipeline}.from_pretrained', [source], loading)}"]
    if lora:
        lines += [f"pipeline.load_lora_weights({source})"]
    if method:
        loaded = _call(
            "PeftModel.from_pretrained",
            [f"pipeline.{part}", adapter],
            {"autocast_adapter_dtype": "False"},
        )
        lines += [f"pipeline.{part} = {loaded}"]
    lines += given.after.splitlines()
    lines += [f"pipeline.to(device)  {OFFLOAD}"]
    lines += [FIRST_CHUNK.rstrip()] if first_chunk else []
    # The first argument of pipelines with conditioning images is the image.
    asked = f"prompt={_literal(prompt)}" if given.arguments else _literal(prompt)
    if chunk:  # of any length
        lines += [f'embeds = FAMILY.prompt_arguments(pipeline, [{asked}], "{CHUNK}")']
        asked = "**embeds"
    if given.encoded:
        embeds = _call("encode", [_literal(prompt), *given.encoded], reading)
        lines += [f"embeds = {embeds}"]
        asked = "**embeds"
    lines += [
        f"seed = torch.Generator().manual_seed({SEED})",
        f"image = {_call('pipeline', [asked], arguments)}.images[0]",
        'image.save("image.png")',
    ]
    if given.imports:
        imports.sort(key=_import_order)
    return "\n".join([*imports, "", DEVICE + lines[0], *lines[1:], ""])


def _import_order(line: str) -> tuple[bool, bool, str]:
    """Return the sort key of an import: standard library, then `import`, then `from` lines."""
    module = line.split()[1].lower()
    return module != "pathlib", line.startswith("from"), module


def _text_code(
    folder: Path,
    family: str,
    prompt: str,
    at: str,
    repo: str | None,
    *,
    raw: bool,
    system: str | None,
) -> str:
    method, lora = (folder / METHOD).is_file(), (folder / "adapter_config.json").is_file()
    causal = family == "causal_lm"
    auto = "AutoModelForCausalLM" if causal else "AutoModelForSeq2SeqLM"
    penalties = _has_penalties(folder)
    config = ", GenerationConfig" if penalties else ""
    download = bool(repo) and (method or lora)
    imports = ["import torch"]
    imports += ["from huggingface_hub import snapshot_download"] if download else []
    imports += ["from peft import PeftModel"] if method else []
    imports += [f"from transformers import {auto}, AutoTokenizer{config}"]
    source, adapter = _places(at, repo, download=download)
    lines = [f'folder = snapshot_download("{repo}")'] if download else []
    lines += [
        f"tokenizer = AutoTokenizer.from_pretrained({source})",
        f"model = {auto}.from_pretrained({source}, dtype=dtype)",
    ]
    lines += [GREEDY.rstrip()] if penalties else []
    if method:
        loaded = _call(
            "PeftModel.from_pretrained", ["model", adapter], {"autocast_adapter_dtype": "False"}
        )
        lines += [f"model = {loaded}"]
    lines += ["model.to(device)"]
    if causal and not raw and _has_chat_template(folder):
        turns = {**({"system": system} if system else {}), "user": prompt}
        lines += [
            "messages = [",
            *(f'    {{"role": "{role}", "content": {_literal(turns[role])}}},' for role in turns),
            "]",
            "inputs = tokenizer.apply_chat_template(\n"
            '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"\n'
            ").to(device)",
        ]
    elif causal and system:  # each turn is tokenised separately, as in training
        lines += [
            f"ids = tokenizer({_literal(system + chr(10))}).input_ids",
            f"ids += tokenizer({_literal(prompt + chr(10))}, add_special_tokens=False).input_ids",
            'inputs = {"input_ids": torch.tensor([ids], device=device)}',
        ]
    else:
        turns_read = [system, prompt] if system else [prompt]
        asked = _literal("\n".join(turns_read) + ("\n" if causal and not raw else ""))
        lines += [f'inputs = tokenizer({asked}, return_tensors="pt").to(device)']
    new = '[0, inputs["input_ids"].shape[1] :]' if causal else "[0]"
    lines += [
        f"tokens = model.generate(**inputs, max_new_tokens={MAX_NEW_TOKENS}, do_sample=False)",
        f"print(tokenizer.decode(tokens{new}, skip_special_tokens=True))",
    ]
    return "\n".join([*imports, "", DEVICE + lines[0], *lines[1:], ""])


def _places(at: str, repo: str | None, *, download: bool) -> tuple[str, str]:
    """Return the code's expressions for the folder and for the adapter in it."""
    if repo and download:
        return "folder", 'f"{folder}/adapter"'
    place = repo or at
    return _literal(place), _literal(f"{place}/adapter")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _call(function: str, values: list[str], named: Mapping[str, Any]) -> str:
    """Return a call on one line, or with one argument per line if that is too long."""
    arguments = [
        *values,
        *(f"{key}{value}" if key == "**" else f"{key}={value}" for key, value in named.items()),
    ]
    line = f"{function}({', '.join(arguments)})"
    if len(line) <= 88:
        return line
    return f"{function}(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"


def _absent_encoders(folder: Path) -> list[str]:
    """Return the text encoders and tokenizers that the base omits, for diffusers."""
    index = _json(folder / "model_index.json")
    absent = [name for name, entry in index.items() if entry == [None, None]]
    return [name for name in absent if name.startswith(("text_encoder", "tokenizer"))]


def _prompt_tokens(folder: Path, family: str, trained: int | None) -> int | None:
    """Return max_sequence_length, if it is not the pipeline's own default."""
    if family not in PROMPT_TOKENS:
        return None
    tokenizer, default = PROMPT_TOKENS[family]
    most = _json(folder / tokenizer / "tokenizer_config.json").get("model_max_length", default)
    length = trained or min(default, int(most))
    return None if length == default else length


def _has_chat_template(folder: Path) -> bool:
    return any((folder / f"chat_template.{end}").is_file() for end in ("jinja", "json")) or bool(
        _json(folder / "tokenizer_config.json").get("chat_template")
    )


def _has_penalties(folder: Path) -> bool:
    """Return whether the base's own generation config would change a greedy answer."""
    config = _json(folder / "config.json") | _json(folder / "generation_config.json")
    return any(config.get(key) not in (None, off) for key, off in PENALTIES.items())


def _json(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return document
