"""Which program a pasted command starts: by its script's name, or by a key that it alone has."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.builders.refusals import refusal

from zerotrain.errors import PipelineError
from zerotrain.importers.command import SUPPORTED, UNSUPPORTED
from zerotrain.importers.command_line import import_command
from zerotrain.importers.keys import DIFFSYNTH, SCRIPTS, SIMPLETUNER, TRAINER
from zerotrain.importers.reading import ImportOptions

sys.path.append(str(Path(__file__).parents[2]))  # `pytest` alone does not find the benchmarks
from benchmarks.import_cases import OTHER_SCRIPTS

EXAMPLES = {key for _, table in SCRIPTS.values() for key in table}
TABLES = {"trainer": {*TRAINER}, "diffsynth": {*DIFFSYNTH}, "simpletuner": {*SIMPLETUNER}}
DREAMBOOTH = (
    "--pretrained_model_name_or_path CompVis/stable-diffusion-v1-4 --instance_data_dir d "
    "--instance_prompt 'a photo of a dog' --max_train_steps 400 --resolution 512 --train_batch_size"
    " 1 --learning_rate 1e-4 --lr_scheduler constant --rank 4"
)


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_mark_is_a_key_of_one_program_alone(name: str) -> None:
    """A key that two programs have says nothing."""
    others = EXAMPLES.union(*(table for other, table in TABLES.items() if other != name))
    assert SUPPORTED[name].keys <= TABLES[name]
    assert SUPPORTED[name].keys.isdisjoint(others)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_mark_of_a_program_that_is_not_read_is_no_key_of_one_that_is(name: str) -> None:
    """Else its commands were refused."""
    assert UNSUPPORTED[name].keys.isdisjoint(EXAMPLES.union(*TABLES.values()))


@pytest.mark.parametrize("script", ["train_dreambooth.py", "train_dreambooth_lora_z_image.py"])
def test_a_script_of_diffusers_that_is_not_known_is_no_other_programs(script: str) -> None:
    """Its flags are SimpleTuner's as well, whose values are others."""
    message = refusal(import_command, f"accelerate launch {script} {DREAMBOOTH}")
    assert f"{script}: not a script that is read" in message


def test_no_command_of_diffusers_pages_is_imported_as_another_programs() -> None:
    """Those of scripts that are not read, as the pages have them."""
    commands = OTHER_SCRIPTS.read_text().splitlines()
    assert len(commands) >= 100
    for command in commands:
        with pytest.raises(PipelineError) as caught:
            import_command(command)
        assert "did you mean" not in str(caught.value)


def test_marks_of_two_programs_are_refused() -> None:
    """Whatever one of them is, the other one's key would be lost."""
    text = "torchrun mine.py --max_steps 3 --dataset_base_path d"
    assert "--max_steps and --dataset_base_path belong to different" in refusal(
        import_command, text
    )


def test_a_launch_of_an_unknown_script_is_read_without_its_flags() -> None:
    """What is certain; `--skip` takes the flags out."""
    launch = "accelerate launch --num_processes 2 --mixed_precision bf16 mine.py"
    found = import_command(launch).values
    assert found["launch.num_processes"] == 2
    skip = ImportOptions(skip=frozenset({"speed"}))
    assert import_command(f"{launch} --speed 3", skip).values == found
    assert "mine.py: not a script that is read" in refusal(import_command, f"{launch} --speed 3")


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_the_file_of_hf_argument_parser_has_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """HfArgumentParser takes one file in the place of all flags."""
    monkeypatch.chdir(tmp_path)
    given = {"model_name_or_path": "a/b", "max_steps": 9, "learning_rate": 3e-4, "bf16": True}
    (tmp_path / f"args.{suffix}").write_text(json.dumps(given))
    launcher = "python -m torch.distributed.launch --nproc_per_node 2"
    found = import_command(f"{launcher} finetune.py args.{suffix}").values
    flags = " ".join(f"--{name} {value}" for name, value in given.items())
    assert found == import_command(f"torchrun --nproc_per_node 2 finetune.py {flags}").values
    assert (found["phases.until"], found["train.learning_rate"]) == (9, 3e-4)
    (tmp_path / f"args.{suffix}").unlink()
    assert f"names args.{suffix}" in refusal(import_command, f"torchrun finetune.py args.{suffix}")
