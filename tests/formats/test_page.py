"""docs/exporting.md: its table is that of the formats, and its commands run."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from tests.builders.adapters import adapter_of, make_adapted
from tests.builders.exports import Export
from tests.builders.runs import make_run
from tests.conftest import ROOT
from tests.formats.conftest import ADAPTER, LAYERS
from tests.formats.languages import exported
from tests.pages.tables import formats_table, replace_generated
from typer.testing import CliRunner

from zerotrain import cli
from zerotrain.artifact import write_json
from zerotrain.export.formats import FORMATS

PAGE = ROOT / "docs" / "exporting.md"


def test_the_table_is_that_of_the_formats(generated):
    """`--fix` writes it."""
    generated(PAGE, replace_generated(PAGE.read_text(), "formats", formats_table()))


@pytest.fixture
def project(
    whole: Path, lora: Path, base: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A LoRA run named cats, runs of whole models named dogs (images) and sums (text)."""
    results = tmp_path / "results"
    for run, weights in (("cats", lora), ("dogs", whole)):
        shutil.copytree(base, results / run / "base")
        shutil.copytree(weights, results / run / "plain" / "weights")
    Export(results / "cats" / "plain", base).save(dict(adapter_of(make_adapted(base, **ADAPTER))))
    sums = exported("causal_lm", tmp_path_factory.mktemp("sums"))
    shutil.copytree(sums.whole, results / "sums" / "offload" / "weights")
    (tmp_path / "config").mkdir()
    document = make_run(
        run="cats",
        data={"source": "digits"},
        phases=[{"name": "plain", "until": 12}],
        lora={"rank": 4, "alpha": 6.0, "target_modules": list(LAYERS)},
    )
    write_json(tmp_path / "config" / "cats.yaml", document)
    return tmp_path


@pytest.mark.slow
def test_every_command_runs(project, monkeypatch):
    """In the order of the page, and every format is among them."""
    monkeypatch.chdir(project)
    commands = re.findall(r"^    zerotrain (.+)$", PAGE.read_text(), re.MULTILINE)
    assert len(commands) > 10
    for command in commands:
        result = CliRunner().invoke(cli.command_line(), shlex.split(command))
        assert result.exception is None, f"{command}: {result.exception}"
        assert "wrote" in result.output or command.startswith("generate")
    used = set(re.findall(r"--to (\w+)", "\n".join(commands)))
    assert used == set(FORMATS)
    assert (project / "red-houses" / "a-red-house-7.png").is_file()
    # Of the same prompt and seed other weights make another image, which gets its own number.
    assert len(list((project / "samples").glob("a-red-house-*.png"))) == 5
