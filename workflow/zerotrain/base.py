"""The base model's folder: which files of a folder or hub repository a family needs.

Whatever else lies there (other precisions, ONNX, pickles) is neither downloaded nor linked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zerotrain.artifact import MANIFEST, digest
from zerotrain.errors import PipelineError
from zerotrain.families import ROOT, Family

KIND = "base"
MODEL_INDEX = "model_index.json"
TEXT_FILES = (".json", ".txt")
TOKENIZER_FILES = (*TEXT_FILES, ".jinja", ".model", ".tiktoken")
"""Of a language model, whose tokenizer lies beside it: chat templates and SentencePiece, too."""
ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS = re.compile(
    r"(?P<stem>model|diffusion_pytorch_model)"
    r"(?P<variant>\.[a-z0-9]+)??(?P<shard>-\d{5}-of-\d{5})?\.safetensors"
)
VARIANT_INDEX = re.compile(r".*\.safetensors\.index\.\w+\.json|.*\.bin\.index.*\.json")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def choose_files(names: Iterable[str], family: Family, source: str) -> dict[str, str]:
    """Choose the files that the family loads.

    Args:
        names: All files, with forward slashes, relative to the model's folder.
        family: The model family.
        source: What messages call the folder or repository.

    Returns:
        The file to take for each name in the base folder. They differ only where weights exist in
        a variant (fp16) alone: the base folder then has them under the plain name.

    Raises:
        PipelineError: a part or its weights are missing.
    """
    names = sorted(names)
    if family.trained_part == ROOT:
        return _choose_root(names, family, source)
    if MODEL_INDEX not in names:
        raise PipelineError(
            f"{source}: no {MODEL_INDEX}, so this is no model in diffusers' layout; "
            f"there is {some(names)}",
            hint=f"name the folder that holds {MODEL_INDEX}; a single-file checkpoint becomes one "
            "with diffusers' from_single_file(FILE).save_pretrained(DIR) of its pipeline's class",
        )
    chosen = {MODEL_INDEX: MODEL_INDEX}
    complete = any(name.split("/")[0] in family.optional_parts for name in names)
    for part in family.parts:
        if part in family.optional_parts and not complete:
            continue
        inside = [n.removeprefix(f"{part}/") for n in names if re.fullmatch(f"{part}/[^/]+", n)]
        if not inside:
            there = sorted({n.split("/")[0] for n in names if "/" in n})
            raise PipelineError(
                f"{source}: the part {part} is missing; there is {some(there)}",
                hint=f"family {family.name} needs {', '.join(family.parts)}; check `base` and "
                "`family`, or complete the folder",
            )
        files = {n: n for n in inside if n.endswith(TEXT_FILES) and not VARIANT_INDEX.fullmatch(n)}
        if part in family.classes:
            files |= _weights(inside, f"{source}: {part}")
        chosen |= {f"{part}/{name}": f"{part}/{file}" for name, file in files.items()}
    return chosen


def in_part(name: str, part: str) -> bool:
    """Whether a file belongs to a part. To one at the root belong its tensors alone: whatever else
    lies beside them (configuration, tokenizer) is no part of what is trained."""
    if part != ROOT:
        return name.split("/")[0] == part
    return name.startswith("model") and name.endswith((".safetensors", ".safetensors.index.json"))


def _choose_root(names: list[str], family: Family, source: str) -> dict[str, str]:
    """The files of a model in transformers' layout."""
    inside = [name for name in names if "/" not in name and name != MANIFEST]
    if ADAPTER_CONFIG in inside:
        raise PipelineError(
            f"{source}: holds an adapter, {ADAPTER_CONFIG}, which training would leave out",
            hint="merge it first (peft: merge_and_unload), or name the model that it belongs to",
        )
    for needed, what in (
        ("config.json", "so this is no model in transformers' layout"),
        ("tokenizer_config.json", "so the tokenizer is missing"),
    ):
        if needed not in inside:
            raise PipelineError(
                f"{source}: no {needed}, {what}; there is {some(names)}",
                hint=f"family {family.name} needs a folder as save_pretrained of model and "
                "tokenizer writes it; check `base` and `family`",
            )
    files = {n: n for n in inside if n.endswith(TOKENIZER_FILES) and not VARIANT_INDEX.fullmatch(n)}
    return files | _weights(inside, source)


def check_config(path: Path, family: Family, source: str) -> None:
    """Check that config.json is of a model that the family's class loads.

    Raises:
        PipelineError: it is no JSON, or of another kind of model.
    """
    import transformers

    try:
        model_type = json.loads(path.read_text()).get("model_type")
    except ValueError as error:
        raise PipelineError(
            f"{source}: config.json is not JSON ({error})", hint="download the model again"
        ) from error
    if model_type not in getattr(transformers, family.classes[ROOT])._model_mapping._model_mapping:
        raise PipelineError(
            f"{source}: config.json is of model_type {model_type!r}, which "
            f"{family.classes[ROOT]} does not load",
            hint=f"choose a base model of the family {family.name}, or change `family`",
        )


def _weights(inside: list[str], where: str) -> dict[str, str]:
    """The safetensors files of one part: full precision if there is one, else a single variant."""
    matches = [match for name in inside if (match := WEIGHTS.fullmatch(name))]
    plain = [match[0] for match in matches if not match["variant"]]
    single = [match[0] for match in matches if not match["variant"] and not match["shard"]]
    if plain:
        return {name: name for name in single or plain}
    variants = [match for match in matches if not match["shard"]]
    if variants:
        return {f"{variants[0]['stem']}.safetensors": variants[0][0]}
    pickles = [name for name in inside if name.endswith(PICKLES)]
    if pickles:
        raise PipelineError(
            f"{where}: weights only as {pickles[0]}, a pickle, which can run code when it is read",
            hint="convert them once, where you trust them: load the pipeline with diffusers and "
            "call save_pretrained(DIR, safe_serialization=True); then set `base` to DIR",
        )
    raise PipelineError(
        f"{where}: no safetensors weights; there is {some(inside)}",
        hint="complete the folder, or download the model again",
    )


def check_model_index(path: Path, family: Family, source: str) -> dict[str, Any]:
    """Check that model_index.json names the family's classes.

    Returns:
        The index without parts that the family does not use, or that are not there and need not
        be, which would be looked for on loading.

    Raises:
        PipelineError: it is no JSON, or names another class.
    """
    try:
        index = json.loads(path.read_text())
    except ValueError as error:
        raise PipelineError(
            f"{source}: {MODEL_INDEX} is not JSON ({error})", hint="download the model again"
        ) from error
    for part, expected in family.classes.items():
        entry = index.get(part)
        found = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
        if found is None and part in family.optional_parts and not (path.parent / part).is_dir():
            continue
        if found != expected:
            raise PipelineError(
                f"{source}: {MODEL_INDEX} names {found or 'nothing'} for {part}, "
                f"family {family.name} needs {expected}",
                hint=f"choose a base model of the family {family.name}, or change `family`",
            )
    absent = {part for part in family.optional_parts if not (path.parent / part).is_dir()}
    loaded = {*family.parts} - absent
    return {
        key: [None, None] if _is_part(value) and key not in loaded else value
        for key, value in index.items()
    }


def part_digests(files: Mapping[str, str]) -> dict[str, str]:
    """Digest of each part from the sha256 of each file; a file at the top is a part of its own."""
    parts: dict[str, dict[str, str]] = {}
    for name, sha256 in files.items():
        parts.setdefault(name.split("/")[0], {})[name] = sha256
    return {part: digest(inside) for part, inside in sorted(parts.items())}


def _is_part(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[1], str)


def some(names: list[str], most: int = 8) -> str:
    """The first of these names, and how many more there are, for messages."""
    if not names:
        return "nothing"
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
