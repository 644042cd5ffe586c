"""Python code that loads and uses a weights folder, for report, README and card.

Its results equal those of `zerotrain sample` and `zerotrain generate` for the same prompt with
their defaults, also with an adapter of any method; a test runs it. No library is imported here.

Pipelines with conditioning images scale these themselves, to about 1024 x 1024 pixels. The code
crops and scales them as in training, and keeps the pipeline from scaling them again.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from zerotrain.config.data import ALPACA
from zerotrain.config.families import FAMILIES, ROOT
from zerotrain.models.families.conditioning import REDUX, read_pipeline
from zerotrain.models.pretrained import read_config
from zerotrain.state.ran_on import RanOn, as_markdown

STEPS, SEED, MAX_NEW_TOKENS = 30, 0, 256
"""Defaults of `zerotrain sample` and `zerotrain generate`."""
TRUNCATE = "truncate"
"""The default of train.long_captions; see zerotrain.models.families.prompt_tokens."""
LORA = "pytorch_lora_weights.safetensors"
METHOD = "adapter/adapter_config.json"
"""The configuration of an adapter other than a LoRA, in a weights folder."""
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
SIDE = 1024
"""Side in pixels that pipelines scale conditioning images to, and default side of their images."""
FILES: Mapping[str, tuple[str, ...]] = {
    "FluxKontextPipeline": ("input.png",),
    "FluxFillPipeline": ("input.png", "mask.png"),
    REDUX: ("input.png",),
    "QwenImageEditPipeline": ("input.png",),
    "QwenImageEditPlusPipeline": ("input.png",),
}
"""Names of the files in the code, for the pipelines that are shown with conditioning images."""
EDIT = {
    "QwenImageEditPipeline": "pipeline_qwenimage_edit",
    "QwenImageEditPlusPipeline": "pipeline_qwenimage_edit_plus",
}
"""Pipelines whose text encoder sees conditioning images, with the modules that they scale in."""
DEVICE = """\
found = torch.accelerator.current_accelerator(check_available=True)
device = found.type if found and found.type in ("cuda", "npu", "mps") else "cpu"
dtype = torch.float32 if device == "cpu" else torch.bfloat16"""


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
    text, method = FAMILIES[family].modality == "text", (folder / METHOD).is_file()
    download = bool(repo) and (method or (text and (folder / "adapter_config.json").is_file()))
    place = repo or at or folder.as_posix()
    values: dict[str, Any] = {
        "repo": repo,
        "prompt": prompt,
        "method": method,
        "download": download,
        "source": "folder" if download else _literal(place),
        "adapter": 'f"{folder}/adapter"' if download else _literal(f"{place}/adapter"),
    }
    if text:
        return _render(
            "loading_code.text.py.j2", values | _text_values(folder, family, prompt, raw, system)
        )
    files = default_files(folder) if images is None else images
    length = _prompt_tokens(folder, family, max_sequence_length)
    values |= _image_values(folder, family, values, files, resolution, length)
    # Readers of the hub do not have zerotrain; diffusers reads only the first 75 tokens.
    if (chunk := long_captions != TRUNCATE) and not repo:
        values["imports"].append(f"from zerotrain.models.families.{family} import FAMILY")
    values["imports"].sort(key=_import_order)
    return _render("loading_code.image.py.j2", values | {"chunk": chunk})


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
        from zerotrain.data.text import alpaca_text

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


def default_files(folder: Path) -> tuple[str, ...]:
    """Return names for a prompt's conditioning images; none for a folder shown without them."""
    index = folder / "model_index.json"
    return FILES.get(read_pipeline(folder) or "", ()) if index.is_file() else ()


def _image_values(
    folder: Path,
    family: str,
    given: Mapping[str, Any],
    files: Sequence[str],
    resolution: int | None,
    length: int | None,
) -> dict[str, Any]:
    """Return the values of the code for an image, other than those `given`."""
    shown = _shown_pipeline(folder, files) if files else None
    side, source = resolution or SIDE, given["source"]
    squares = [f"load_square({_literal(file)})" for file in files] if shown else []
    loading = {"dtype": "dtype", **dict.fromkeys(_absent_encoders(folder), "None")}
    loading |= {key: repr(value) for key, value in FAMILIES[family].loading.items()}
    pipeline = "DiffusionPipeline"
    imports = ["import torch"]
    imports += ["from huggingface_hub import snapshot_download"] if given["download"] else []
    imports += ["from peft import PeftModel"] if given["method"] else []
    arguments: dict[str, Any] = {}
    if shown:
        pipeline = "FluxPipeline" if shown == REDUX else shown
        imports += ["from PIL.Image import Resampling", "from diffusers.utils import load_image"]
    if shown == REDUX:
        imports += ["import numpy", "from diffusers import FluxPipeline, ReduxImageEncoder"]
        imports += ["from transformers import SiglipVisionModel"]
    else:
        imports += [f"from diffusers import {pipeline}"]
    if shown == "QwenImageEditPlusPipeline":
        arguments["image"] = f"[{', '.join(squares)}]"
    elif shown and shown != REDUX:
        arguments["image"] = squares[0]
    if shown == "FluxFillPipeline":
        arguments["mask_image"] = squares[1]
    if shown == "FluxKontextPipeline" and side != SIDE:
        arguments |= {"max_area": f"{side}**2", "_auto_resize": "False"}
    if shown in EDIT and side != SIDE:
        imports += [f"from diffusers.pipelines.qwenimage import {EDIT[shown]} as edit"]
    if shown in EDIT and not given["repo"]:
        own = "zerotrain.models.families.qwen_image_encoding"
        imports += ["from pathlib import Path"]
        imports += [f"from {own} import add_token_types, load_processor"]
        loading["**"] = f'load_processor("{shown}", Path({source}))'
    # The first argument of pipelines with conditioning images is the image.
    prompt = _literal(given["prompt"])
    asked = f"prompt={prompt}" if arguments else prompt
    arguments |= {"height": resolution, "width": resolution} if resolution else {}
    arguments |= {"num_inference_steps": STEPS, "generator": "seed"}
    reading = {"max_sequence_length": length} if length else {}
    arguments |= {} if shown == REDUX else reading
    if FAMILIES[family].negative_prompt:
        arguments["negative_prompt"] = '""'
    return {
        "imports": imports,
        "pipeline": pipeline,
        "shown": shown,
        "unknown": bool(files) and shown is None,
        "redux": shown == REDUX,
        "edits": shown in EDIT,
        "squares": squares,
        "side": side,
        "rescaled": side != SIDE,
        "part": FAMILIES[family].trained_part,
        "lora": (folder / LORA).is_file(),
        "loading": loading,
        "asked": asked,
        "reading": reading,
        "arguments": arguments,
    }


def _shown_pipeline(folder: Path, files: Sequence[str]) -> str | None:
    """Return the pipeline that takes these conditioning images; None if diffusers has none."""
    named = read_pipeline(folder) or ""
    if named == "FluxPipeline":  # the same model with one image, which in-context training reads
        named = "FluxKontextPipeline"
    if named == "FluxKontextPipeline" and len(files) > 1:
        return None
    return named if named in FILES else None


def _text_values(
    folder: Path, family: str, prompt: str, raw: bool, system: str | None
) -> dict[str, Any]:
    causal = not FAMILIES[family].encoder_decoder
    turns = [system, prompt] if system else [prompt]
    return {
        "auto": FAMILIES[family].classes[ROOT],
        "causal": causal,
        "penalties": _has_penalties(folder),
        "chat": not raw and _has_chat_template(folder),
        "system": system,
        "asked": "\n".join(turns) + ("\n" if causal and not raw else ""),
    }


def _render(template: str, values: Mapping[str, Any]) -> str:
    return str(_environment().get_template(template).render(values))


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["literal"] = _literal
    made.globals |= {"device": DEVICE, "seed": SEED, "most": MAX_NEW_TOKENS, "call": _call}
    made.globals["unchanged"] = {"autocast_adapter_dtype": "False"}
    return made


def _import_order(line: str) -> tuple[bool, bool, str]:
    """Return the sort key of an import: standard library, then `import`, then `from` lines."""
    module = line.split()[1].lower()
    return module != "pathlib", line.startswith("from"), module


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
    if (prompt := FAMILIES[family].prompt) is None:
        return None
    config = _json(folder / prompt.tokenizer / "tokenizer_config.json")
    length = trained or min(prompt.default, int(config.get("model_max_length", prompt.default)))
    return None if length == prompt.default else length


def _has_chat_template(folder: Path) -> bool:
    return any((folder / f"chat_template.{end}").is_file() for end in ("jinja", "json")) or bool(
        _json(folder / "tokenizer_config.json").get("chat_template")
    )


def _has_penalties(folder: Path) -> bool:
    """Return whether the base's own generation config would change a greedy answer."""
    config = _json(folder / "config.json") | _json(folder / "generation_config.json")
    return any(config.get(key) not in (None, off) for key, off in PENALTIES.items())


def _json(path: Path) -> dict[str, Any]:
    return read_config(path) if path.is_file() else {}
