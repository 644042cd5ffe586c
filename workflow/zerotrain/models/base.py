"""The base model's folder: which files of a folder or hub repository a family needs.

They are chosen by fixed lists of the names that diffusers and transformers load. Other files (other
precisions, ONNX, pickles, a user's notes) are neither downloaded nor linked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zerotrain.artifact import MANIFEST, digest, file_sha256, read
from zerotrain.artifact.links import is_hub_blob
from zerotrain.artifact.verdicts import remembering
from zerotrain.config.families import ROOT, FamilySpec
from zerotrain.config.suggestions import join_first
from zerotrain.errors import PipelineError
from zerotrain.models.adapter_config import ADAPTER_CONFIG
from zerotrain.models.pretrained import check_libraries, read_config

KIND = "base"
MODEL_INDEX = "model_index.json"
README = "README.md"
"""Explains how to load the folder; it is not part of the model."""
CONFIG_FILES = frozenset(("config.json", "generation_config.json"))
"""Configurations next to weights."""
INDEX_FILES = frozenset(
    f"{stem}.safetensors.index.json" for stem in ("model", "diffusion_pytorch_model")
)
SCHEDULER_FILES = frozenset(("scheduler_config.json",))
TOKENIZER_FILES = frozenset(
    (
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("added_tokens.json", "chat_template.jinja", "chat_template.json", "tokenizer.model"),
        *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model"),
        *("sentencepiece.model", "spm.model", "spm_char.model", "tiktoken.model", "bpe.codes"),
        *("dict.txt", "source.spm", "target.spm", "target_vocab.json", "vocab-src.json"),
        *("vocab-tgt.json", "byte_maps.json", "emoji.json", "entity_vocab.json", "normalizer.json"),
        *("prophetnet.tokenizer", "word_pronunciation.json", "word_shape.json"),
        *("tekken.json", "qwen.tiktoken"),
    )
)
"""Settings and vocabularies of all tokenizers of transformers."""
PROCESSOR_FILES = frozenset(
    ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
)
WEIGHTS = re.compile(
    r"(?P<stem>model|diffusion_pytorch_model)"
    r"(?P<variant>\.[a-z0-9]+)??(?P<shard>-\d{5}-of-\d{5})?\.safetensors"
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def choose_files(names: Iterable[str], family: FamilySpec, source: str) -> dict[str, str]:
    """Choose the files that the family loads.

    Args:
        names: All files, with forward slashes, relative to the model's folder.
        family: The model family.
        source: Name of the folder or repository in messages.

    Returns:
        The file to take for each name in the base folder. The two differ only if weights exist
        solely in a variant (fp16): the base folder then has them under the plain name.

    Raises:
        PipelineError: a part or its weights are missing.
    """
    names = sorted(names)
    if family.trained_part == ROOT:
        return _choose_root(names, family, source)
    if MODEL_INDEX not in names:
        raise PipelineError(
            f"{source}: no {MODEL_INDEX}, so this is not a model in diffusers' layout; "
            f"there is {join_first(names)}",
            hint=f"name the folder that holds {MODEL_INDEX}; a single-file checkpoint becomes one "
            "with diffusers' from_single_file(FILE).save_pretrained(DIR) of its pipeline's class",
        )
    chosen = {MODEL_INDEX: MODEL_INDEX}
    complete = any(name.split("/")[0] in family.optional_parts for name in names)
    extra = list(family.extra_parts)
    if not any(name.split("/")[0] in extra[:1] for name in names):
        extra = []
    for part in (*family.parts, *extra):
        if part in family.optional_parts and not complete:
            continue
        inside = [n.removeprefix(f"{part}/") for n in names if re.fullmatch(f"{part}/[^/]+", n)]
        if not inside:
            there = sorted({n.split("/")[0] for n in names if "/" in n})
            raise PipelineError(
                f"{source}: the part {part} is missing; there is {join_first(there)}",
                hint=f"family {family.name} needs {', '.join((*family.parts, *extra))}; "
                "check `base` and `family`, or complete the folder",
            )
        files = {name: name for name in inside if name in loaded_names(part, family)}
        if part in family.classes or part in extra:
            files |= _weights(inside, f"{source}: {part}")
        chosen |= {f"{part}/{name}": f"{part}/{file}" for name, file in files.items()}
    return chosen


def loaded_names(part: str, family: FamilySpec) -> frozenset[str]:
    """Return the names of the files that are loaded from a part in addition to its weights."""
    if part in family.classes or part in family.extra_parts:
        return CONFIG_FILES | INDEX_FILES
    return SCHEDULER_FILES if part == "scheduler" else TOKENIZER_FILES | PROCESSOR_FILES


def is_model_file(name: str) -> bool:
    """Return whether a library loads a file of this name, for a model or an adapter."""
    last = name.rpartition("/")[2]
    known = CONFIG_FILES | INDEX_FILES | SCHEDULER_FILES | TOKENIZER_FILES | PROCESSOR_FILES
    return last in known | {MODEL_INDEX, ADAPTER_CONFIG} or last.endswith(".safetensors")


def list_others(names: Iterable[str], chosen: Iterable[str], family: FamilySpec) -> list[str]:
    """List the files that are not part of the model, and the folders of no part.

    Other forms of the weights are not listed.

    Args:
        names: All files, as `choose_files` takes them.
        chosen: The files that it chose, by the same names.
        family: The model family.
    """
    weights = (".safetensors", ".index.json", *PICKLES, ".onnx", ".onnx_data", ".msgpack", ".h5")
    parts = {""} if family.trained_part == ROOT else {*family.parts}
    names = {*names}
    left = {name for name in names if name.rpartition("/")[0] in parts} - {*chosen}
    left |= {f"{name.partition('/')[0]}/" for name in names if "/" in name} - {
        f"{name.partition('/')[0]}/" for name in chosen if "/" in name
    }
    described = (MANIFEST, README)
    return sorted(name for name in left if not name.endswith(weights) and name not in described)


def check_inside(folder: Path, names: Iterable[str], source: str) -> None:
    """Check that files of a model are in its folder after links are resolved.

    A snapshot of the hub consists of links into its cache, whose files are named by their content.
    A base that this program published also has links, to files with the hashes it lists.

    Args:
        folder: The model's folder.
        names: The files to take.
        source: Name of the folder in messages.

    Raises:
        PipelineError: a link leads to another place.
    """
    root, listed = Path(os.path.realpath(folder)), _listed_hashes(folder)
    sha256 = remembering(file_sha256)
    for name in names:
        target = Path(os.path.realpath(folder / name))
        if target.is_relative_to(root) or is_hub_blob(target):
            continue
        # A published base lists the hash of the file that it links to.
        if not target.is_file() or listed.get(name) != sha256(target):
            raise PipelineError(
                f"{source}: {name} is a link that leads out of it, to {target}",
                hint="copy the file in the link's place if it belongs to the model; parts from "
                "several folders are named in `base` as PLACE:FILES,PLACE:FILES",
            )


def _listed_hashes(folder: Path) -> dict[str, str]:
    """Return the hash of each file that a published base lists; nothing for other folders."""
    try:
        found = read(folder, KIND, verify=False)
    except PipelineError:
        return {}
    return {name: entry["sha256"] for name, entry in found.files.items()}


def in_part(name: str, part: str) -> bool:
    """Return whether a file belongs to a part.

    Only the tensors belong to a part at the root: the files next to them (configuration, tokenizer)
    are not trained.
    """
    if part != ROOT:
        return name.split("/")[0] == part
    return name.startswith("model") and name.endswith((".safetensors", ".safetensors.index.json"))


def _choose_root(names: list[str], family: FamilySpec, source: str) -> dict[str, str]:
    """Choose the files of a model in transformers' layout."""
    inside = [name for name in names if "/" not in name and name != MANIFEST]
    if ADAPTER_CONFIG in inside:
        raise PipelineError(
            f"{source}: holds an adapter, {ADAPTER_CONFIG}, which training would leave out",
            hint="merge it first (peft: merge_and_unload), or name the model that it belongs to",
        )
    for needed, what in (
        ("config.json", "so this is not a model in transformers' layout"),
        ("tokenizer_config.json", "so the tokenizer is missing"),
    ):
        if needed not in inside:
            raise PipelineError(
                f"{source}: no {needed}, {what}; there is {join_first(names)}",
                hint=f"family {family.name} needs a folder as save_pretrained of model and "
                "tokenizer writes it; check `base` and `family`",
            )
    loaded = CONFIG_FILES | INDEX_FILES | TOKENIZER_FILES | PROCESSOR_FILES
    files = {name: name for name in inside if name in loaded}
    return files | _weights(inside, source)


def check_config(path: Path, family: FamilySpec, source: str) -> None:
    """Check that config.json describes a model that the family's class loads.

    Raises:
        PipelineError: as read_model_type, or it describes another kind of model.
    """
    import transformers

    model_type = read_model_type(path, source)
    if model_type not in getattr(transformers, family.classes[ROOT])._model_mapping._model_mapping:
        raise PipelineError(
            f"{source}: config.json is of model_type {model_type!r}, which "
            f"{family.classes[ROOT]} does not load",
            hint=f"choose a base model of the family {family.name}, or change `family`",
        )


def read_model_type(path: Path, source: str) -> str:
    """Return the model_type in a config.json of transformers.

    Raises:
        PipelineError: the file is not JSON, or names no model_type.
    """
    if (found := read_config(path).get("model_type")) is None:
        raise PipelineError(
            f"{source}: config.json names no model_type, by which transformers chooses its class",
            hint="download the model again, or write it with save_pretrained",
        )
    return str(found)


def _weights(inside: list[str], where: str) -> dict[str, str]:
    """Choose the safetensors files of a part: in full precision if possible, else a variant."""
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
        f"{where}: no safetensors weights; there is {join_first(inside)}",
        hint="complete the folder, or download the model again",
    )


def check_model_index(path: Path, family: FamilySpec, source: str) -> dict[str, Any]:
    """Check that model_index.json names the family's classes.

    Returns:
        The index, with null for parts that the family does not use and for absent optional parts:
        loading would look for them.

    Raises:
        PipelineError: it is not JSON, or names another class, or a library that is not loaded.
    """
    index = read_config(path)
    absent = {part for part in family.optional_parts if not any((path.parent / part).glob("*"))}
    for part, expected in family.classes.items():
        entry = index.get(part)
        found = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
        if found is None and part in absent:
            continue
        if found != expected:
            raise PipelineError(
                f"{source}: {MODEL_INDEX} names {found or 'nothing'} for {part}, "
                f"family {family.name} needs {expected}",
                hint=f"choose a base model of the family {family.name}, or change `family`",
            )
    loaded = {*family.parts} - absent
    found = {
        key: [None, None] if _is_part(value) and key not in loaded else value
        for key, value in index.items()
    }
    check_libraries(found, path)
    return found


def part_digests(files: Mapping[str, str]) -> dict[str, str]:
    """Compute the digest of each part from its files' sha256; a top-level file is a part."""
    parts: dict[str, dict[str, str]] = {}
    for name, sha256 in files.items():
        parts.setdefault(name.split("/")[0], {})[name] = sha256
    return {part: digest(inside) for part, inside in sorted(parts.items())}


def _is_part(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[1], str)
