"""The JSON schema and the page of keys are those of the models, and hold the shipped files."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from pydantic import BaseModel
from ruamel.yaml import YAML
from tests.pages.configuration import documents, schema

from zerotrain.config.read import parse_config
from zerotrain.config.section import Section

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "config").glob("*.yaml"))
WHOLE = re.compile(r"```yaml\n(run: .*?)```", re.S)
"""A whole configuration on a page."""
EXAMPLE = (ROOT / "docs" / "configuration.md").read_text().split("```yaml\n")[1].split("```")[0]


def test_generated_files_are_current(generated: Callable[[Path, str], None]) -> None:
    """config/schema.json and docs/configuration.md are what the models give."""
    page = (ROOT / "docs" / "configuration.md").read_text()
    for path, text in documents(page).items():
        generated(ROOT / path, text)


@pytest.mark.parametrize("model", Section.__subclasses__())
def test_every_section_refuses_unknown_keys(model: type[BaseModel]) -> None:
    """A mistyped key never passes in silence."""
    assert model.model_config["extra"] == "forbid"


def test_every_key_is_described() -> None:
    """The schema describes each key of each section, or the section it stands for."""
    found = schema()
    for name, section in {"RunConfig": found, **found["$defs"]}.items():
        assert section["additionalProperties"] is False, name
        for key, value in section["properties"].items():
            assert value.get("description") or "$ref" in value, f"{name}.{key}"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configurations_pass_both(path: Path) -> None:
    """What pydantic takes, the schema in an editor takes too."""
    raw = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    parse_config(raw, str(path))
    jsonschema.validate(raw, json.loads((ROOT / "config" / "schema.json").read_text()))


def test_documented_example_passes_both() -> None:
    """The example in docs/configuration.md is a valid file."""
    raw = YAML(typ="safe").load(EXAMPLE)
    jsonschema.validate(raw, schema())
    config = parse_config(raw, "example")
    assert [phase.train.learning_rate for phase in config.phases] == [1e-5, 5e-6]


@pytest.mark.parametrize(
    "change",
    [{"lr": 1}, {"until": 0}, {"until": "soon"}, {"launch": "zero9"}, {"launch": {"x": 1}}],
)
def test_schema_refuses_wrong_phases(change: dict[str, object]) -> None:
    """A phase is flat in the file, and its schema knows that form."""
    raw = YAML(typ="safe").load(EXAMPLE)
    raw["phases"][0] |= change
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(raw, schema())


def test_whole_configurations_on_pages_are_valid() -> None:
    """As the shipped ones."""
    found = [
        text for page in (ROOT / "docs").glob("*.md") for text in WHOLE.findall(page.read_text())
    ]
    assert len(found) > 1
    for text in found:
        parse_config(YAML(typ="safe").load(text), "docs")
