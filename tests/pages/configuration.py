"""The keys of the configuration, generated from its models: a JSON schema and the page of keys.

Both show the form of the file, where a phase is flat: name, until, launch and any training value.
`make test ARGS=--fix` writes them again after a model was changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.pages.tables import replace_generated, table

from zerotrain.config.problems import PHASE_KEYS
from zerotrain.config.run import RunConfig

SCHEMA = Path("config/schema.json")
PAGE = Path("docs/configuration.md")

FILE = {"type": "string", "pattern": r"\.(yaml|yml|json)$"}
STEP = {"type": "integer", "minimum": 1}
STEPS = {"type": "string", "pattern": r"^\s*[0-9.]+(e[0-9]+)?\s*((step|epoch|sample)s?)?\s*$"}


def schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file."""
    found: dict[str, Any] = _plain(RunConfig.model_json_schema())
    models = found["$defs"]
    phase, train = models["Phase"], models["TrainConfig"]
    own = {key: phase["properties"][key] for key in PHASE_KEYS}
    about = {"description": own["until"]["description"]}
    own["until"] = {"anyOf": [STEP, STEPS], **about}
    preset = dict(models["LaunchConfig"]["properties"]["preset"])
    preset.pop("default", None)
    about = {"description": own["launch"]["description"]}
    own["launch"] = {"anyOf": [preset, FILE, {"$ref": "#/$defs/LaunchConfig"}], **about}
    found["properties"]["resume_from_checkpoint"]["anyOf"].insert(0, {"type": "string"})
    models["DataConfig"]["properties"]["aspect_buckets"]["anyOf"].insert(0, {"type": "boolean"})
    # A phase's training values default to those of the run, so none is shown here.
    changes = {key: _without_default(value) for key, value in train["properties"].items()}
    phase["properties"] = own | changes
    title = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {**title, **found, "title": "zerotrain run"}


def _plain(node: Any) -> Any:
    """Return a node without titles, with short descriptions and the schema language's bounds."""
    names = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    if isinstance(node, dict):
        return {
            names.get(key, key): _plain(value)
            for key, value in node.items()
            if not (key == "title" and isinstance(value, str))
        }
    if isinstance(node, list):
        return [_plain(value) for value in node]
    return node.partition("\n\n")[0] if isinstance(node, str) else node


def _without_default(value: dict[str, Any]) -> dict[str, Any]:
    return {key: entry for key, entry in value.items() if key != "default"}


def keys() -> str:
    """Return the tables of keys, a section each, as Markdown."""
    found = schema()
    sections = [_section("### The run", "", found, found)]
    for key, value in found["properties"].items():
        model = _referenced(found, value)
        if model:
            sections.append(_section(f"### `{key}`", model["description"], found, model))
        if model and key == "data":
            nested = found["$defs"]["BucketConfig"]
            heading = "#### `data.aspect_buckets`"
            sections.append(_section(heading, nested["description"], found, nested))
    return "\n".join(sections)


def _section(heading: str, about: str, found: dict[str, Any], model: dict[str, Any]) -> str:
    rows, required = model["properties"], model.get("required", ())
    if heading == "### `phases`":
        rows = {key: rows[key] for key in PHASE_KEYS}
        about = "A list. A phase also takes every key of `train`, which it changes."
    rows_of_keys = []
    for key, value in rows.items():
        section = _referenced(found, value)
        values = "see below" if section and model is found else _values(found, value)
        default = "required" if key in required else _default(value)
        meaning = value.get("description") or (section or {}).get("description", "")
        rows_of_keys.append((f"`{key}`", values, default, meaning))
    text = f"{heading}\n\n" + (f"{about}\n\n" if about else "")
    return text + table(("key", "values", "default", "meaning"), rows_of_keys)


def _referenced(found: dict[str, Any], value: dict[str, Any]) -> dict[str, Any] | None:
    choices = [value, value.get("items", {}), *value.get("anyOf", [])]
    reference = next((choice["$ref"] for choice in choices if "$ref" in choice), None)
    return found["$defs"][reference.rpartition("/")[2]] if reference else None


def _default(value: dict[str, Any]) -> str:
    default = value.get("default")
    return "" if default is None or isinstance(default, dict) else f"`{json.dumps(default)}`"


def _values(found: dict[str, Any], value: dict[str, Any]) -> str:
    """Describe the choices, or the type and its bounds."""
    choices = value.get("anyOf", [value])
    return " or ".join(_kind(found, choice) for choice in choices if choice.get("type") != "null")


def _kind(found: dict[str, Any], value: dict[str, Any]) -> str:
    if "anyOf" in value:
        return _values(found, value)
    if "enum" in value or "const" in value:
        return ", ".join(f"`{entry}`" for entry in value.get("enum", [value.get("const")]))
    if "$ref" in value or value["type"] == "object":
        return "a mapping"
    words = {
        "string": "text",
        "integer": "whole number",
        "number": "number",
        "boolean": "true, false",
    }
    if value["type"] == "array":
        items = value.get("items", {})
        return f"list of {_kind(found, items)}" if "enum" in items else _list(items)
    word = words[value["type"]]
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {value[key]}" for key, sign in bounds.items() if key in value]
    return " ".join([word, " and ".join(limits)]).strip()


def _list(items: dict[str, Any]) -> str:
    if "prefixItems" in items:
        return "list of pairs of whole numbers"
    return "list of mappings" if "$ref" in items else "list of text"


def documents(page: str) -> dict[Path, str]:
    """Return the generated files with their content, given the present text of the page of keys."""
    return {
        SCHEMA: json.dumps(schema(), indent=1) + "\n",
        PAGE: replace_generated(page, "keys", keys()),
    }
