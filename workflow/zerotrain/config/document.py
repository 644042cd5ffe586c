"""What the configuration takes, generated from its models: a JSON schema and the page of keys.

Both show the form of the file, where a phase is flat: name, until, launch and any training value.
Run `python -m zerotrain.config.document`, or pytest with --fix, after changing a model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zerotrain.config.models import RunConfig
from zerotrain.config.read import PHASE_KEYS

SCHEMA = Path("config/schema.json")
PAGE = Path("docs/configuration.md")
BEGIN, END = "<!-- keys: generated -->", "<!-- keys: end -->"

FILE = {"type": "string", "pattern": r"\.(yaml|yml|json)$"}
STEP = {"type": "integer", "minimum": 1}
STEPS = {"type": "string", "pattern": r"^\s*[0-9.]+(e[0-9]+)?\s*((step|epoch|sample)s?)?\s*$"}


def schema() -> dict[str, Any]:
    """JSON schema of a configuration file."""
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
    # A phase's training values default to those of the run, so none is shown here.
    changes = {key: _without_default(value) for key, value in train["properties"].items()}
    phase["properties"] = own | changes
    title = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {**title, **found, "title": "zerotrain run"}


def _plain(node: Any) -> Any:
    """Without generated titles, with short descriptions and the schema language's own bounds."""
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
    """The tables of keys, a section each, as Markdown."""
    found = schema()
    sections = [_section("The run", "", found, found)]
    for key, value in found["properties"].items():
        model = _referenced(found, value)
        if model:
            sections.append(_section(f"`{key}`", model["description"], found, model))
    return "\n".join(sections)


def _section(heading: str, about: str, found: dict[str, Any], model: dict[str, Any]) -> str:
    rows, required = model["properties"], model.get("required", ())
    if heading == "`phases`":
        rows = {key: rows[key] for key in PHASE_KEYS}
        about = "A list. Beside these keys a phase takes every key of `train`, which it changes."
    lines = [f"### {heading}", *([] if not about else ["", about]), ""]
    lines += ["| key | values | default | meaning |", "|---|---|---|---|"]
    for key, value in rows.items():
        section = _referenced(found, value)
        values = "see below" if section and model is found else _values(found, value)
        default = "required" if key in required else _default(value)
        meaning = value.get("description") or (section or {}).get("description", "")
        lines.append(f"| `{key}` | {values} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def _referenced(found: dict[str, Any], value: dict[str, Any]) -> dict[str, Any] | None:
    choices = [value, value.get("items", {}), *value.get("anyOf", [])]
    reference = next((choice["$ref"] for choice in choices if "$ref" in choice), None)
    return found["$defs"][reference.rpartition("/")[2]] if reference else None


def _default(value: dict[str, Any]) -> str:
    default = value.get("default")
    return "" if default is None or isinstance(default, dict) else f"`{json.dumps(default)}`"


def _values(found: dict[str, Any], value: dict[str, Any]) -> str:
    """In words: the choices, or the type and its bounds."""
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
        items = value["items"]
        return f"list of {_kind(found, items)}" if "enum" in items else _list(items)
    word = words[value["type"]]
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {value[key]}" for key, sign in bounds.items() if key in value]
    return " ".join([word, " and ".join(limits)]).strip()


def _list(items: dict[str, Any]) -> str:
    return "list of mappings" if "$ref" in items else "list of text"


def documents(page: str) -> dict[Path, str]:
    """The generated files with their content; `page` is the present text of the page of keys."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return {
        SCHEMA: json.dumps(schema(), indent=1) + "\n",
        PAGE: f"{before}{BEGIN}\n{keys()}{END}{after}",
    }


def main() -> None:
    """Write both files again; run it in the project's folder."""
    for path, text in documents(PAGE.read_text()).items():
        path.write_text(text)


if __name__ == "__main__":
    main()
