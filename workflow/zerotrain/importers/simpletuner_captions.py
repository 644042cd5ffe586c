"""The captions of SimpleTuner's datasets as the caption options of a source.

Source: documentation/DATALOADER.md and simpletuner/helpers/prompts.py of SimpleTuner at bc8e6ab7.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents import parse_json
from zerotrain.errors import PipelineError
from zerotrain.importers.files import find_file, load_text
from zerotrain.importers.imported_config import ImportedConfig

STRATEGIES = ("textfile", "filename", "instanceprompt")
TABLES = ("parquet", "huggingface")
"""Strategies that read the captions of a table."""
CAPTIONS = (
    "caption_strategy",
    "instance_prompt",
    "prepend_instance_prompt",
    "only_instance_prompt",
)
"""Keys of the program, for datasets without them."""
FILTER = "caption_filter_list"
REPLACEMENT = re.compile(r"s/([^/]+)/([^/]*)/?")
SEPARATORS = {"comma": ",", "period": "."}
FILTERED = (
    "words and phrases match whole words here, before the prefix is added; there they match "
    "anywhere"
)
SHUFFLED = (
    "orders are drawn by the caption alone; {} stored variants, of which training draws one each "
    "time"
)
CLINGS = "; the first tag stays behind instance_prompt"


def share_captions(program: Mapping[str, Any], dataset: dict[str, Any]) -> None:
    """Give a dataset the program's keys of captions, as SimpleTuner does."""
    for key in CAPTIONS:
        if key in program and (key != "caption_strategy" or dataset.get("type") == "local"):
            dataset.setdefault(key, program[key])
    if program.get("only_instance_prompt"):
        dataset["only_instance_prompt"] = True


def put_captions(
    found: Mapping[str, Any], result: ImportedConfig, prefix: str = "", at: str = "data."
) -> None:
    """Set the source of the captions, and what is added to them and removed.

    Args:
        found: The keys of a dataset, or of the program.
        result: Receives the keys of captions.
        prefix: Prefix of the keys in messages.
        at: Prefix of our keys.

    Raises:
        PipelineError: the captions are neither in files, in a table that can be read, in names,
            nor a common prompt.
    """
    strategy = _strategy(found, result, prefix, at)
    prompt = found.get("instance_prompt")
    if strategy == "instanceprompt":
        if not prompt:
            raise PipelineError(f"{prefix}instance_prompt is missing", hint="add it")
        result.keep(f"{prefix}instance_prompt", prompt, f"{at}instance_prompt")
        if found.get("prepend_instance_prompt"):
            reason = "instance_prompt is the whole caption"
            result.ignore(f"{prefix}prepend_instance_prompt", True, reason)
    elif found.get("prepend_instance_prompt"):
        if not prompt:
            raise PipelineError(
                f"{prefix}prepend_instance_prompt: instance_prompt is missing", hint="add it"
            )
        ours = f"{at}caption_prefix"
        result.note("kept", f"{prefix}prepend_instance_prompt", True, "", ours)
        result.keep(f"{prefix}instance_prompt", prompt, ours, str(prompt).strip())
    elif prompt is not None:
        result.ignore(f"{prefix}instance_prompt", prompt, f"caption_strategy is {strategy}")
    if strategy == "textfile":
        whole = bool(found.get("disable_multiline_split"))
        name, ours = f"{prefix}disable_multiline_split", f"{at}multiline_captions"
        if whole:
            result.note("kept", name, True, "a caption file is one caption", ours)
        else:
            result.keep(name, False, ours, "split", "each line is a caption, and one is drawn")
    if (shuffle := found.get("caption_shuffle")) is not None:
        _put_shuffle(shuffle, found, strategy, result, prefix, at)


def _strategy(found: Mapping[str, Any], result: ImportedConfig, prefix: str, at: str) -> str | None:
    """Set data.caption_strategy or data.metadata, and return the strategy."""
    strategy = found.get("caption_strategy")
    if found.get("only_instance_prompt"):
        result.note("kept", f"{prefix}only_instance_prompt", True, "", f"{at}caption_strategy")
        strategy = "instanceprompt"
    if strategy == "instance_prompt":
        strategy = "instanceprompt"
    if strategy == "parquet":
        _put_table(found, result, prefix, at)
    elif strategy == "huggingface":
        result.note("kept", f"{prefix}caption_strategy", strategy, "", "data.source")
    elif strategy is not None and strategy not in STRATEGIES:
        raise PipelineError(
            f"{prefix}caption_strategy is {strategy}",
            hint=f"one of {', '.join((*STRATEGIES, *TABLES))}; other captions into a "
            "metadata.jsonl with file_name and text",
        )
    elif strategy is not None:
        result.keep(f"{prefix}caption_strategy", strategy, f"{at}caption_strategy")
    elif found.get("type") == "local":
        result.assume(f"{at}caption_strategy", "filename", "SimpleTuner's default")
    return strategy


def _put_table(found: Mapping[str, Any], result: ImportedConfig, prefix: str, at: str) -> None:
    """Set data.metadata, for a table with names of columns that are read here.

    Raises:
        PipelineError: it has other columns, or its names of files are not those of the images.
    """
    table, key = found.get("parquet"), f"{prefix}parquet"
    if not isinstance(table, dict) or not table.get("path"):
        raise PipelineError(f"{key}: names no table", hint='{"path": "captions.parquet", ...}')
    named = table.get("filename_column", "id"), table.get("caption_column", "caption")
    known = named[0] in ("file_name", "image") and named[1] in ("text", "prompt", "caption")
    if not known or not table.get("identifier_includes_extension"):
        raise PipelineError(
            f"{key}: the columns {named[0]} and {named[1]} are not read from {table['path']}",
            hint="name them file_name and text, with the files' extensions, and set "
            "identifier_includes_extension: true",
        )
    if table.get("fallback_caption_column"):
        raise PipelineError(
            f"{key}.fallback_caption_column: one column has the captions",
            hint=f"fill {named[1]} of {table['path']} with it where it is empty",
        )
    result.note("kept", f"{prefix}caption_strategy", "parquet", "", f"{at}metadata")
    result.keep(key, table, f"{at}metadata", str(table["path"]))


def _put_shuffle(
    shuffle: Any,
    found: Mapping[str, Any],
    strategy: str | None,
    result: ImportedConfig,
    prefix: str,
    at: str,
) -> None:
    """Set shuffled tags: SimpleTuner stores shuffled captions, too.

    Raises:
        PipelineError: tags are separated by spaces, or it is no section.
    """
    key = f"{prefix}caption_shuffle"
    if not isinstance(shuffle, dict):
        raise PipelineError(f"{key} is {shuffle!r}", hint='{"enable": true, "count": 3}')
    if not shuffle.get("enable") or strategy == "instanceprompt":
        result.ignore(key, shuffle, "captions are not shuffled")
        return
    split = str(shuffle.get("split_on", "comma"))
    if split not in SEPARATORS:
        raise PipelineError(
            f"{key}.split_on is {split}", hint=f"tags are shuffled between {', '.join(SEPARATORS)}"
        )
    separator = SEPARATORS[split]
    for name in ("position_start", "count"):
        if not isinstance(shuffle.get(name, 0), int):
            raise PipelineError(f"{key}.{name} is {shuffle[name]!r}", hint="write a whole number")
    kept, reason = shuffle.get("position_start", 0), ""
    if found.get("prepend_instance_prompt") and (prompt := found.get("instance_prompt")):
        # There the prompt is added to shuffled captions; here its tags are the first of them.
        tags = [tag for tag in str(prompt).split(separator) if tag.strip()]
        ends = str(prompt).rstrip().endswith(separator)
        reason = "" if ends or kept else CLINGS
        kept = kept + len(tags) if ends else max(kept, 1) + len(tags) - 1
    count = shuffle.get("count", 1) + bool(shuffle.get("include_original", True))
    result.put(
        "changed", key, shuffle, f"{at}shuffle_caption", True, SHUFFLED.format(count) + reason
    )
    result.keep(f"{key}.count", count, f"{at}caption_variants")
    if kept:
        result.keep(f"{key}.position_start", kept, f"{at}keep_tokens")
    if separator != ",":
        result.keep(f"{key}.split_on", split, f"{at}caption_separator", separator)


def filters_by_dataset(
    entries: Sequence[Mapping[str, Any]], path: Path
) -> dict[str | None, list[str]]:
    """Return the caption filters of each dataset of text embeddings, and under None the default's.

    Args:
        entries: All datasets of a file.
        path: The file, next to which lists are looked for.

    Raises:
        PipelineError: a list is missing, or is neither a list nor a .txt or .json file.
    """
    texts = [one for one in entries if one.get("dataset_type") == "text_embeds"]
    found: dict[str | None, list[str]] = {}
    for entry in texts:
        filters = _filters(entry.get(FILTER) or [], path)
        found[str(entry.get("id"))] = filters
        if entry.get("default") or len(texts) == 1:
            found[None] = filters
    return found


def _filters(given: Any, path: Path) -> list[str]:
    if isinstance(given, str):
        file = find_file(given, path)
        text = load_text(file, f"{FILTER} is a list, or a .txt file of lines")
        given = parse_json(text, file) if file.suffix == ".json" else text.splitlines()
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise PipelineError(f"{path}: {FILTER} is no list of texts", hint="a list, or a file")
    return [one for one in given if one.strip()]


def put_filters(
    filters: Sequence[str], result: ImportedConfig, prefix: str = "", at: str = "data."
) -> None:
    """Set the words that are removed from captions, and replaced.

    Args:
        filters: Phrases, and replacements in the form s/search/replacement/.
        result: Receives the keys of captions.
        prefix: Prefix of the key in messages.
        at: Prefix of our keys.

    Raises:
        PipelineError: one is a regular expression.
    """
    key = f"{prefix}{FILTER}"
    if not filters or result.is_skipped(key, [*filters]):
        return
    pairs = {one: match for one in filters if (match := REPLACEMENT.fullmatch(one))}
    phrases = [one for one in filters if one not in pairs]
    for one in (*phrases, *(match[1] for match in pairs.values())):
        if re.search(r"[\\^$*+?{}\[\]|()]", one):
            raise PipelineError(
                f"{key}: {one!r} is a regular expression",
                hint="list the words and phrases that it finds, or change the caption files; "
                f"`--skip {key}` leaves all filters out",
            )
    if phrases:
        removed = [one.strip() for one in phrases]
        result.put("changed", key, removed, f"{at}{FILTER}", removed, FILTERED)
    if pairs:
        replaced = {match[1]: match[2] for match in pairs.values()}
        result.put("changed", key, [*pairs], f"{at}caption_replacements", replaced, FILTERED)
