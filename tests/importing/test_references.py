"""Every configuration and command of the four guides, with all that comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from ruamel.yaml import YAML
from tests.builders.runs import make_run
from tests.importing.conftest import leaves

from zerotrain.config.read import parse_config
from zerotrain.importers.imported_config import ImportedConfig, config_text, report
from zerotrain.machine.detect import Device, Machine, choose_precision
from zerotrain.machine.host import detect_host

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "importing"
REFERENCES = Path(__file__).parent / "references"
NAMES = sorted(str(path.relative_to(REFERENCES)) for path in REFERENCES.rglob("*.*"))
ASKS = {
    "diffsynth/commands.sh", "diffsynth/deepspeed_zero3_cpuoffload.yaml",
    "diffsynth/ds_z3_cpuoffload.json", "openmind/precision.json", "openmind/example_zero2.json",
    "openmind/example_zero3.json",
}  # fmt: skip
"""Those that leave the precision open."""


@pytest.mark.parametrize("name", NAMES)
def test_a_guides_snippet_becomes_the_golden_file(
    name: str, imported: Callable[..., ImportedConfig], generated: Callable[[Path, str], None]
) -> None:
    """The configuration, and below it what became of every key."""
    found = imported(name, "bf16" if name in ASKS else None)
    told = "".join(f"# {line}\n" for line in report(found.notes).splitlines())
    golden = GOLDEN / f"{name.replace('/', '-').replace('.', '_')}.yaml"
    generated(golden, f"{config_text(found)}\n# Report:\n{told}")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_as_it_was_meant(
    name: str, imported: Callable[..., ImportedConfig]
) -> None:
    """By YAML 1.1 and 1.2, without an "auto", and with a batch that multiplies out."""
    found = imported(name, "bf16" if name in ASKS else None)
    text = config_text(found)
    values = YAML(typ="safe").load(text)
    assert values == yaml.safe_load(text) == found.nested()
    assert "auto" not in leaves(values)
    train, launch = values["train"], values["launch"]
    parts = train["gradient_accumulation_steps"] * launch["num_processes"]
    assert train["global_batch_size"] % parts == 0
    assert max(len(line) for line in text.splitlines() if "base:" not in line) <= 240


@pytest.mark.parametrize(("capability", "expected"), [((8, 0), "bf16"), ((7, 5), "fp16")])
@pytest.mark.parametrize("name", sorted(ASKS))
def test_the_machine_decides_a_precision_that_nothing_says(
    name: str,
    capability: tuple[int, int],
    expected: str,
    imported: Callable[..., ImportedConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the report says so; DiffSynth-Studio's own commands load their models in bf16."""
    device = Device(name="a GPU", capability=capability)
    machine = Machine(accelerator="cuda", host=detect_host(), devices=(device,))
    monkeypatch.setattr("zerotrain.machine.detect.detect", lambda: machine)
    found = imported(name, choose=choose_precision)
    own = name == "diffsynth/commands.sh"
    assert found.values["launch.mixed_precision"] == ("bf16" if own else expected)
    reasons = [n.reason for n in found.notes if n.ours == "launch.mixed_precision"]
    said = "DiffSynth-Studio loads this model in bf16" if own else "chosen for this machine"
    assert all(said in reason for reason in reasons)
    if (own, expected) == (False, "fp16"):
        assert "compute capability 7.5) does not compute bf16" in reasons[0]


def test_all_of_it_is_what_the_configuration_takes(
    imported: Callable[..., ImportedConfig],
) -> None:
    """Of every guide's file, in a run of the example's data."""
    for name in NAMES:
        nested = imported(name, "bf16" if name in ASKS else None).nested()
        missing = make_run(run="a", data={"source": "digits"})
        config = parse_config({**missing, **nested}, name)
        assert config.phases[0].launch.preset == nested["launch"]["preset"]
