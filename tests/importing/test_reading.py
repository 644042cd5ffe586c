"""Batches that do not multiply out, commands taken apart, and files that a run points at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from zerotrain.errors import PipelineError
from zerotrain.importers.command import parse_commands
from zerotrain.importers.reading import ImportOptions, import_file, launch_from_file

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "config" / "launch"
ZERO2 = {"zero_optimization": {"stage": 2}}


def read(place: Path, config: Any, name: str = "ds.json", **options: Any) -> dict[str, Any]:
    """The values of a file."""
    (place / name).write_text(json.dumps(config))  # JSON is YAML
    return import_file(Path(name), ImportOptions(presets=PRESETS, **options)).values


def test_numbers_that_do_not_multiply_out_are_named(place: Path) -> None:
    """All three, where the processes are known too."""
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
             "gradient_accumulation_steps": 4}  # fmt: skip
    assert read(place, ZERO2 | batch)["launch.num_processes"] == 1
    assert read(place, ZERO2 | batch | {"train_batch_size": 32})["launch.num_processes"] == 4
    with pytest.raises(PipelineError, match=r"8 is not 2 .* x 4 .* x 2 \(processes\): .* make 16"):
        read(place, ZERO2 | batch, num_processes=2)


def test_a_command_is_taken_apart() -> None:
    """Joined lines, redirections, values behind = and without, flags without a value."""
    (command,) = parse_commands(
        "# train\naccelerate launch --num-processes=2 --use_deepspeed --zero_stage 3 \\\n"
        "  train.py --a 1 --b=x --c > log.txt 2>&1 &\n"
    )
    assert command.flags == {"num_processes": "2", "use_deepspeed": True, "zero_stage": "3"}
    assert (command.script, command.log) == ("train.py", "log.txt")
    assert command.arguments == {"a": "1", "b": "x", "c": True}


def test_a_run_points_at_a_file(place: Path) -> None:
    """What the file leaves open the run says; what both say has to agree."""
    path = place / "ds.json"
    path.write_text(json.dumps(ZERO2 | {
        "bf16": {"enabled": "auto"}, "train_batch_size": "auto", "gradient_clipping": 0.5,
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    }))  # fmt: skip
    run = {"mixed_precision": "bf16"}, {"global_batch_size": 8}
    launch, train = launch_from_file(path, *run, PRESETS)
    assert launch == {"preset": "zero2", "mixed_precision": "bf16"}
    assert train == {"max_grad_norm": 0.5}
    with pytest.raises(PipelineError, match="mixed_precision next to it"):
        launch_from_file(path, {}, {}, PRESETS)
    with pytest.raises(PipelineError, match=r"max_grad_norm 0.5, but the run says 1.0"):
        launch_from_file(path, {"mixed_precision": "bf16"}, {"max_grad_norm": 1.0}, PRESETS)


def test_pointing_at_a_file_imports_no_torch(place: Path) -> None:
    """The configuration is read while Snakemake draws its graph."""
    (place / "ds.json").write_text(json.dumps(ZERO2))
    code = (
        "import sys; from pathlib import Path\n"
        "from zerotrain.importers.reading import launch_from_file\n"
        f"launch_from_file(Path('ds.json'), presets=Path({str(PRESETS)!r}))\n"
        "print([name for name in ('torch', 'deepspeed', 'accelerate') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_the_command_writes_and_reports(place: Path) -> None:
    """The configuration on standard output, the report next to it."""
    (place / "config").symlink_to(ROOT / "config")
    config = ZERO2 | {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    (place / "ds.json").write_text(json.dumps(config))
    words = [sys.executable, "-m", "zerotrain", "launch", "import", "ds.json"]
    quiet = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    done = subprocess.run([*words, "--precision", "fp16"], **quiet)  # type: ignore[call-overload]
    assert YAML(typ="safe").load(done.stdout)["launch"]["mixed_precision"] == "fp16"
    assert "resolved  fp16.enabled auto -> launch.mixed_precision: fp16" in done.stderr
