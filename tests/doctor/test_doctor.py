"""The doctor tells what is here, what would stop a training, and nothing private."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.builders.commands import run_zerotrain
from tests.builders.phases import make_swapped_phase, make_tiny_phase, write_launch
from tests.builders.states import HISTORY, RAN_ON, publish_checkpoint
from tests.machine.fakes import A100, GIB, T4, machine
from typer.testing import CliRunner

from zerotrain import cli
from zerotrain.errors import PipelineError
from zerotrain.machine.detect import Machine, TorchBuild
from zerotrain.run.doctor import examine as examination
from zerotrain.run.doctor.examine import examine, verdicts
from zerotrain.run.doctor.report import Report, redact
from zerotrain.training.process import nvme_check

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "config" / "launch"
GOOD = {"torch": "", "deepspeed": ""}
OPS: dict[str, Any] = {
    "built": {"cpu_adam": True, "deepspeed_shm_comm": True, "async_io": False},
    "compiler": "c++ 12", "libaio_headers": True,
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the shipped presets and one run."""
    shutil.copytree(PRESETS, tmp_path / "config" / "launch")
    (tmp_path / "config" / "tiny.yaml").write_text(
        "# a note\nrun: tiny\nbase: nano\ndata: {images: photos}\nphases:\n"
        "  - {name: swapped, until: 8, launch: torch}\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a machine in this one's place."""

    def put(found: Machine, answer: dict[str, Any] | None = None, cuda: str | None = None) -> None:
        reply = {"error": "", "accelerator": found.accelerator, "threads": 8, "deepspeed": ""}
        monkeypatch.setattr(examination, "torch_build", lambda: TorchBuild("2.13.0", cuda))
        monkeypatch.setattr(examination, "detect", lambda: found)
        monkeypatch.setattr(examination, "probe", lambda: {**reply, **(answer or {})})
        monkeypatch.setattr(examination, "find_ops", lambda: OPS)

    put(machine())
    return put


def test_a_sound_machine_has_no_problem(project: Path, here: Any) -> None:
    """Every part is there, sizes in words; exit code 0."""
    here(machine("cuda", A100), cuda="12.8")
    report = examine()
    assert report.problems == []
    text = report.text()
    assert text.startswith("zerotrain doctor: no problem found\n")
    for line in (
        "  accelerator: CUDA", "    - name: NVIDIA A100", "      memory: 40.0 GiB",
        "      compute_capability: 8.0", "  torch: 2.13.0, built for CUDA 12.8",
        "    async_io: no", "  zero2: yes, with mixed_precision no, bf16, fp16",
    ):  # fmt: skip
        assert line in text.splitlines()
    assert CliRunner().invoke(cli.command_line(), ["doctor"]).exit_code == 0


def test_json_has_the_same_facts(project: Path, here: Any) -> None:
    """Sizes as numbers."""
    result = CliRunner().invoke(cli.command_line(), ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert found["problems"] == []
    assert found["host"]["memory_bytes"] == 64 * GIB
    assert set(found["presets"]) == {path.stem for path in PRESETS.glob("*.yaml")}


@pytest.mark.parametrize(
    ("build", "answer", "problem"),
    [
        (None, {"error": "No module named 'torch'"}, "torch is not installed: `make setup`"),
        (
            TorchBuild("2.13.0"),
            {"error": "ImportError: libcudart.so.12"},
            "torch 2.13.0 is broken: ImportError: libcudart.so.12",
        ),
        (
            TorchBuild("2.13.0"),
            {"deepspeed": "ImportError: x"},
            "DeepSpeed cannot be imported: ImportError: x",
        ),
    ],
)
def test_a_broken_installation_is_a_problem(
    project: Path, here: Any, monkeypatch: pytest.MonkeyPatch, build: Any, answer: Any, problem: str
) -> None:
    """And the report comes all the same; exit code 1."""
    here(machine(), answer)
    monkeypatch.setattr(examination, "torch_build", lambda: build)
    report = examine()
    assert report.problems == [problem]
    assert report.facts["presets"]["zero3"] == f"no: {problem}"
    assert CliRunner().invoke(cli.command_line(), ["doctor"]).exit_code == 1


def test_an_accelerator_that_does_not_serve_is_a_problem(project: Path, here: Any) -> None:
    """Torch of a CPU build, or a driver that torch cannot use; not one that is hidden."""
    here(replace(machine(), unused="an NVIDIA GPU is here, but ..."))
    assert examine().problems == ["an NVIDIA GPU is here, but ..."]
    here(replace(machine("cuda", T4), driver="470.1"), {"accelerator": "cpu"})
    assert examine().problems == [
        "this machine has CUDA, but torch computes on cpu: driver 470.1 and torch's build may not "
        "go together"
    ]
    here(replace(machine(), unused="CUDA_VISIBLE_DEVICES='' hides the GPUs"))
    assert examine().problems == []


def test_presets_say_why_not() -> None:
    """By machine, compiler and libaio; torch alone needs none of them."""
    on_mps = verdicts(PRESETS, machine("mps", A100), OPS, GOOD)
    assert on_mps["torch"].startswith("yes")
    assert {said for name, said in on_mps.items() if name.startswith("zero")} == {
        "no: DeepSpeed does not run on MPS: it has neither collectives nor compiled ops for it"
    }
    here = verdicts(PRESETS, machine("cuda", T4), OPS, GOOD)
    assert here["zero3_nvme"] == "yes, with mixed_precision no, fp16; async_io will be built first"
    missing = {**OPS, "libaio_headers": False}
    on_cpu = verdicts(PRESETS, machine(), OPS, GOOD)
    assert on_cpu["zero3_nvme"] == "yes, with mixed_precision bf16; async_io will be built first"
    no_libaio = verdicts(PRESETS, machine(), missing, GOOD)
    assert no_libaio["zero3_nvme"].startswith("no: libaio's headers are missing")
    assert no_libaio["zero3_offload"] == "yes, with mixed_precision no, bf16"
    bare = {**OPS, "built": dict.fromkeys(OPS["built"], False), "compiler": None}
    assert verdicts(PRESETS, machine(), bare, GOOD)["zero1"] == (
        "no: its compiled ops are not built, and there is no C++ compiler"
    )


def test_a_full_or_closed_disk_is_a_problem(
    project: Path, here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of results/."""
    (project / "results").mkdir()
    monkeypatch.setattr(examination, "LEAST_FREE", 2**80)
    (problem,) = examine().problems
    assert "MB free: checkpoints will not fit" in problem
    monkeypatch.setattr("zerotrain.machine.disk.write_trouble", lambda _: "Read-only file system")
    assert examine().problems == ["results cannot be written: Read-only file system"]


def run_of(project: Path, offload: Path) -> Path:
    """A phase that swaps to a disk, stopped at step 5 of 8."""
    folder = project / "results" / "tiny" / "swapped"
    folder.mkdir(parents=True)
    write_launch(folder, make_swapped_phase(offload))
    (folder / "progress" / "step-00000005").mkdir(parents=True)
    (folder / "progress" / "step-00000005" / "manifest.json").write_text("{}")
    (folder / "progress" / "exit.json").write_text('{"code": 85, "reason": "stopped on request"}')
    log = project / "results" / "tiny" / "logs" / "train_phase.swapped.log"
    log.parent.mkdir()
    log.write_text("".join(f"line {number}\n" for number in range(30)))
    return folder


def test_a_run_is_shown_with_what_stopped_it(project: Path, here: Any) -> None:
    """Configuration, launch, newest checkpoint, end, log; and its missing disk is a problem."""
    run_of(project, project / "away")
    report = examine("tiny")
    run = report.facts["run"]
    assert run["config"] == "config/tiny.yaml"
    assert run["config_text"][0] == "| run: tiny"
    last = run["last_phase"]
    assert last["launch_files"] == ["accelerate.yaml", "deepspeed.json", "run.yaml"]
    assert last["newest_checkpoint"]["step"] == 5
    assert last["ended"] == "code 85: stopped on request"
    assert run["log"][1:] == [f"| line {number}" for number in range(10, 30)]
    assert last["offload_path"] == {"path": str(project / "away"), "there": False}
    (problem,) = report.problems
    assert problem.startswith(
        f"phase swapped: launch.offload_path {project}/away is no folder on this machine"
    )
    (project / "away").mkdir()
    assert examine("tiny").problems == []


def test_a_run_is_shown_with_what_it_ran_on_and_what_changed(project: Path, here: Any) -> None:
    """Of the newest checkpoint; a damaged one is shown without."""
    folder = run_of(project, project) / "progress" / "step-00000005"
    newest = examine("tiny").facts["run"]["last_phase"]["newest_checkpoint"]
    assert "ran_on" not in newest
    shutil.rmtree(folder)
    publish_checkpoint(folder, 5, ran_on=RAN_ON, history=HISTORY[:1])
    report = examine("tiny")
    newest = report.facts["run"]["last_phase"]["newest_checkpoint"]
    assert newest["ran_on"]["device"] == "NVIDIA H100 80GB HBM3, driver 570.86"
    assert newest["changed"] == ["after step 120: torch 2.12.0 → 2.13.0"]
    assert "after step 120: torch 2.12.0 → 2.13.0" in report.text()


def test_values_that_are_not_default_come_with_their_source(project: Path, here: Any) -> None:
    """And no others."""
    folder = run_of(project, project)
    document = yaml.safe_load((folder / "launch" / "run.yaml").read_text())
    document["learning_rate"] = {"value": 1e-3, "source": "user"}
    document["micro_batch_size"] = {"value": 4, "source": "derived", "reason": "4 / 1"}
    (folder / "launch" / "run.yaml").write_text(yaml.safe_dump(document))
    found = examine("tiny").facts["run"]["last_phase"]["not_default"]
    own = {key: value for key, value in found.items() if "." not in key}
    assert own == {"learning_rate": "0.001 (user)", "micro_batch_size": "4 (derived: 4 / 1)"}
    assert found["deepspeed.train_batch_size"] == "4 (derived: train.global_batch_size)"
    assert "deepspeed.steps_per_print" not in found


def test_a_run_that_this_machine_cannot_train_is_a_problem(project: Path, here: Any) -> None:
    """As training would say; a phase that is trained to its end is none."""
    folder = run_of(project, project)
    here(machine("mps", A100))
    (problem,) = examine("tiny").problems
    assert problem.startswith("phase swapped: preset zero3_nvme cannot run here")
    (folder / "progress" / "step-00000008").mkdir()
    (folder / "progress" / "step-00000008" / "manifest.json").write_text("{}")
    assert examine("tiny").problems == []


def test_nvme_offload_is_checked_when_asked_for(
    project: Path, here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each phase that swaps, by its launch files; other numbers are a problem."""
    folder = run_of(project, project)
    plain = folder.with_name("plain")
    plain.mkdir()
    write_launch(plain, make_tiny_phase("plain", "torch", 8))
    trials: list[Path] = []
    monkeypatch.setattr(nvme_check, "check", lambda _, launch: trials.append(launch) or "right")
    assert "nvme" not in examine("tiny").facts["run"]
    found = examine("tiny", nvme=True).facts["run"]["nvme"]
    assert found == {"plain": "swaps nothing to a disk", "swapped": "right"}
    assert [*map(Path.absolute, trials)] == [folder / "launch"]

    def refuse(phase: Any, launch: Path) -> None:
        raise PipelineError("wrong updates", hint="use zero3_offload")

    monkeypatch.setattr(nvme_check, "check", refuse)
    assert examine("tiny", nvme=True).problems == ["wrong updates. use zero3_offload"]
    result = CliRunner().invoke(cli.command_line(), ["doctor", "--nvme"])
    assert "name a RUN" in str(result.exception)


def test_a_broken_config_or_run_yaml_does_not_hide_the_rest(project: Path, here: Any) -> None:
    """Each is a problem of its own."""
    folder = run_of(project, project)
    with (project / "config" / "tiny.yaml").open("a") as stream:
        stream.write("lerning_rate: 1\n")
    (folder / "launch" / "run.yaml").write_text("nonsense: {}\n")
    report = examine("tiny")
    assert len(report.problems) == 2
    assert "lerning_rate: unknown key" in report.problems[0]
    assert "run.yaml: is damaged, or written by another version" in report.problems[1]
    assert report.facts["run"]["last_phase"]["newest_checkpoint"]["step"] == 5


@pytest.mark.parametrize(
    "content", ["a: [", "run: *x", "[" * 3000, "\x00", "run: other\nbase: 7\n"]
)
def test_another_broken_file_of_config_does_not_hide_the_run(
    project: Path, here: Any, content: str
) -> None:
    """Only the run's own file is read."""
    run_of(project, project)
    (project / "config" / "cats.yaml").write_text(content)
    (project / "config" / "dogs.yaml").write_bytes(b"run: \xff")
    report = examine("tiny")
    assert not any("cats" in problem or "dogs" in problem for problem in report.problems)
    assert report.facts["run"]["last_phase"]["newest_checkpoint"]["step"] == 5


def test_an_unknown_run_is_refused(project: Path, here: Any) -> None:
    """With the runs that are there."""
    with pytest.raises(PipelineError, match="has the run dogs"):
        examine("dogs")


def test_nothing_private_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the home folder nor tokens nor passwords; other paths stay."""
    monkeypatch.setattr(Path, "home", lambda: Path("/home/jane"))
    text = (
        "/home/jane/.venv, '/home/jane', /home/janet/x, /fast/jane, token hf_AbCdEfGhIjKlMn, "
        "https://jane:secret@hub.org"
    )
    assert redact(text) == (
        "~/.venv, '~', /home/janet/x, /fast/jane, token ***, https://***@hub.org"
    )
    report = Report({"a": {"b": "/home/jane/x"}}, ["/home/jane/y is full"])
    assert "jane" not in report.text() + report.json()


def test_the_environment_is_not_shown(
    project: Path, here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for four variables of threads and devices."""
    monkeypatch.setenv("WANDB_API_KEY", "very-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    report = examine()
    assert "very-secret" not in report.text() + report.json()
    assert report.facts["threads"]["OMP_NUM_THREADS"] == "3"


def test_the_real_thing_without_a_working_torch(tmp_path: Path) -> None:
    """A torch that cannot be imported: the report says so and has everything else."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.12: gone')")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0'; cuda = hip = None")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "workflow")])
    ended = run_zerotrain("doctor", folder=ROOT, PYTHONPATH=path)
    assert ended.returncode == 1, ended.stderr
    assert "torch 2.13.0 is broken: ImportError: libcudart.so.12: gone" in ended.stdout
    assert "  accelerate: " in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr
