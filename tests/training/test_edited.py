"""What an edit of a half-trained phase does to its progress: nothing is lost or hidden."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.builders.phases import make_tiny_phase
from tests.builders.refusals import refusal, refused

from zerotrain import artifact
from zerotrain.artifact.recipe import format_differences
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.training.checkpointing import conditions, set_aside
from zerotrain.training.checkpointing.progress_folder import saved_steps, step_folder
from zerotrain.training.checkpointing.set_aside import complete_moves
from zerotrain.training.process.lock import take
from zerotrain.training.process.progress_commands import accept
from zerotrain.training.process.start import prepare_progress_folder

CACHE = "c" * 64
PHASE = make_tiny_phase("plain", "torch", 300)
EDITED = PHASE.with_values(learning_rate=1e-4)


def trains(phase: ResolvedPhase) -> dict[str, Any]:
    """What a phase trains, with digests of inputs that do not matter here."""
    found = {**phase.numbers(), "base": "b" * 64, "data": "d" * 64, "start": None}
    return json.loads(json.dumps(found))


def save(
    progress: Path,
    *steps: int,
    phase: ResolvedPhase = PHASE,
    text: str = "",
    values: dict[str, Any] | None = None,
) -> None:
    """Publish rolling checkpoints that were trained with the values of a phase, or with others."""
    for step in steps:
        with artifact.publish(step_folder(progress, step), "checkpoint") as draft:
            draft.content = conditions.manifest_content(values or trains(phase))
            ran_on = {"cache": CACHE, "code": "1" * 64}
            artifact.write_json(draft.folder / "checkpoint.json", {"step": step, "ran_on": ran_on})
            (draft.folder / "rank-00000-00000.safetensors").write_text(f"{text} {step}")


def start(progress: Path, phase: ResolvedPhase = PHASE, **other: Any) -> str:
    """What a start of the phase says; its lock is held meanwhile."""
    held = take(progress)
    try:
        complete_moves(progress)
        return "\n".join(prepare_progress_folder(progress, trains(phase) | other, phase))
    finally:
        held.release()


@pytest.fixture
def progress(tmp_path: Path) -> Path:
    """The folder of a phase's progress."""
    folder = tmp_path / "results" / "run" / "plain" / "progress"
    folder.mkdir(parents=True)
    return folder


def aside(progress: Path) -> list[Path]:
    """The folders that were set aside."""
    return sorted(progress.parent.glob("progress.stale-*"))


def hashes(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but those that say why it was moved."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
        and path.name not in ("set_aside.json", "accepted.json")
        and not path.name.startswith("lock")
    }


def test_equal_values_keep_everything(progress: Path) -> None:
    """A second start resumes where the first stopped, and says nothing."""
    save(progress, 100)
    before = hashes(progress)
    assert start(progress) == ""
    assert hashes(progress) == before
    assert not aside(progress)


ADVICE = {
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2, "micro_batch_size": 2},
    "dynamo_backend": {"dynamo_backend": "inductor", "dynamo_mode": "max-autotune"},
    "full_determinism": {"full_determinism": False},
    "allow_tf32": {"allow_tf32": True},
    "num_cpu_threads_per_process": {"num_cpu_threads_per_process": 3},
    "keep": {"keep": 1},
    "nan_action": {"nan_action": "skip"},
    "disk_low_threshold": {"disk_low_threshold": 2**30},
    "report_to": {"report_to": []},
    "ddp_timeout": {"ddp_timeout": 7200},
    "main_process_port": {"main_process_port": 29511},
    "find_unused_parameters": {"find_unused_parameters": True},
    "offload_path": {"offload_path": "/elsewhere"},
    "ema_device": {"ema_device": "cpu"},
    "partition_activations": {"partition_activations": True},
    "cpu_checkpointing": {"cpu_checkpointing": True},
    "zero3_init": {"zero3_init": True},
    "until": {"until_step": 400, "lr_scheduler_steps": 400},
}
"""What messages and docs/troubleshooting.md advise for a training that is under way."""


@pytest.mark.parametrize("change", ADVICE.values(), ids=ADVICE.keys())
def test_what_messages_advise_discards_nothing(change: dict[str, Any], progress: Path) -> None:
    """The half-trained phase keeps its checkpoints."""
    phase = PHASE.with_values(use_ema=True)
    advised = phase.with_values(**change)
    save(progress, 100, phase=phase)
    assert start(progress, advised) == ""
    assert saved_steps(progress) == [100]


def test_an_edit_sets_the_steps_aside_and_says_what_differs(progress: Path) -> None:
    """Before it trains: old and new values, steps, how to restore them and how to continue."""
    save(progress, 200, 250, text="first")
    (progress / "metrics.jsonl").write_text("log")
    before = hashes(progress)
    edited = EDITED.with_values(objective={"snr_gamma": 5.0, "noise_offset": 0.1})
    said = start(progress, edited)
    (stale,) = aside(progress)
    assert said == (
        f"{progress}: its 250 steps were trained with other values than phase plain has now "
        "(learning_rate 0.001 -> 0.0001; objective.noise_offset not set -> 0.1): they are set "
        f"aside as {stale}, and training restarts from the start of the phase. To restore them, "
        "write the former values back and start again. To continue from step 250 with the new "
        "values: `zerotrain progress accept run/plain`"
    )
    assert saved_steps(progress) == []
    assert hashes(stale) == before


def test_an_undone_edit_takes_the_steps_back(progress: Path) -> None:
    """Whether the restarted training has saved something, which is kept, or not."""
    save(progress, 250)
    start(progress, EDITED)
    (progress / "metrics.jsonl").write_text("of the restart")
    (stale,) = aside(progress)
    assert start(progress) == (
        f"plain: {stale.name} was trained with the present values and is taken back, with its 250 "
        "steps"
    )
    assert saved_steps(progress) == [250]
    assert not aside(progress)
    start(progress, EDITED)
    save(progress, 7, phase=EDITED)
    said = start(progress)
    (kept,) = aside(progress)
    assert f"plain: steps of other values are kept as {kept}" in said
    assert saved_steps(kept) == [7]
    assert saved_steps(progress) == [250]


@pytest.mark.parametrize("data", ["data", "base", "start", "lora"])
def test_data_base_and_start_count_as_edits(data: str, progress: Path) -> None:
    """Digests are shortened."""
    save(progress, 250)
    found = set_aside.read_recorded(progress, 300)
    assert found
    changed = conditions.changes(found[1], trains(PHASE) | {data: "e" * 64})
    old = "not set" if data in ("start", "lora") else f"{data[0]}" * 12
    assert format_differences(changed) == f"{data} {old} -> {'e' * 12}"


def test_keys_that_did_not_exist_count_as_their_defaults(progress: Path) -> None:
    """An upgrade adds keys: at their default they are no edit, at another value they are."""
    found = trains(PHASE)
    del found["peft"], found["trainable_parameters"], found["optimizer_args"]
    save(progress, 100, values=found)
    assert start(progress) == ""
    said = start(progress, PHASE.with_values(trainable_parameters=["norm"]))
    assert 'trainable_parameters [] -> ["norm"]' in said


def test_continue_resumes_and_stop_refuses(progress: Path) -> None:
    """train.on_change, which is itself no part of what is trained."""
    save(progress, 250)
    stop = EDITED.with_values(on_change="stop")
    error = refused(start, progress, stop)
    assert error.what == (
        f"{progress}: its 250 steps were trained with other values than phase plain has now "
        "(learning_rate 0.001 -> 0.0001); train.on_change: stop"
    )
    assert "set train.on_change: continue" in error.hint
    assert start(progress, EDITED.with_values(on_change="continue")) == (
        "plain: continues from step 250 with other values (learning_rate 0.001 -> 0.0001): "
        "train.on_change: continue"
    )
    assert start(progress, PHASE.with_values(on_change="stop")) == ""
    assert saved_steps(progress) == [250]


@pytest.mark.parametrize("step", [301, 400])
def test_steps_after_a_lowered_until_are_kept_and_named(progress: Path, step: int) -> None:
    """Training restarts, which is reported before it does; an `until` that reaches them resumes.
    Where train.on_change forbids a restart it is refused."""
    save(progress, step, 500)
    before = hashes(progress)
    said = start(progress)
    assert f"its checkpoints (steps {step}, 500) are all after `until` 300: " in said
    assert "training restarts from the start of the phase" in said
    assert f"with an `until` of {step} or later" in said
    for on_change in ("stop", "continue"):
        with pytest.raises(PipelineError, match=rf"are all after .*train.on_change: {on_change}"):
            start(progress, PHASE.with_values(on_change=on_change))
    assert start(progress, PHASE.with_values(until_step=step)) == ""
    assert hashes(progress) == before
    assert not aside(progress)


def test_accept_continues_with_exactly_the_values_that_were_asked_for(progress: Path) -> None:
    """What was there meanwhile is kept; a later edit is another one."""
    save(progress, 250, text="first")
    start(progress, EDITED)
    save(progress, 7, phase=EDITED, text="other")
    (set_aside_one,) = aside(progress)
    said = accept(progress.parent)
    (kept,) = aside(progress)
    assert said == (
        f"{progress}: taken back from {set_aside_one.name}, resumes from step 250; what was there "
        f"is kept as {kept}"
    )
    assert saved_steps(kept) == [7]
    assert (
        "continues from step 250 with other values (learning_rate 0.001 -> 0.0001): accepted"
        in (start(progress, EDITED))
    )
    assert saved_steps(progress) == [250]
    later = EDITED.with_values(seed=8)
    assert "seed 7 -> 8" in start(progress, later)
    assert saved_steps(progress) == []


def test_a_command_accepts_for_what_it_starts_alone(
    progress: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `zerotrain switch --accept` does: a killed one leaves no file that accepts anything."""
    save(progress, 250)
    monkeypatch.setenv(set_aside.ENVIRONMENT, artifact.digest(trains(EDITED)))
    assert "accepted" in start(progress, EDITED)
    monkeypatch.delenv(set_aside.ENVIRONMENT)
    assert "are set aside" in start(progress, EDITED)


@pytest.mark.parametrize("interrupted", range(1, 6))
def test_a_move_that_was_killed_is_completed(
    interrupted: int, progress: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any of its renames, there and back: no file is lost, and no second folder is made."""
    save(progress, 200, 250)
    (progress / "metrics.jsonl").write_text("log")
    before = hashes(progress)
    plain = Path.rename
    for phase, place in ((EDITED, aside), (PHASE, lambda progress: [progress])):
        calls = iter(range(1, 100))

        def killed(path: Path, target: Path, calls: Any = calls) -> Path:
            if next(calls) == interrupted:
                raise KeyboardInterrupt
            return plain(path, target)

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(Path, "rename", killed)
            start(progress, phase)
        start(progress, phase)
        assert hashes(place(progress)[0]) == before
        left = {one.name.partition("-")[0] for one in progress.parent.iterdir()}
        assert left <= {"progress", "progress.stale"}
    assert not aside(progress)


def test_damaged_checkpoints_of_a_restart_are_kept(progress: Path) -> None:
    """Taking back removes no checkpoint, whole or not."""
    save(progress, 250)
    start(progress, EDITED)
    save(progress, 7, phase=EDITED)
    step_folder(progress, 7).rename(progress / "damaged-step-00000007")
    start(progress)
    assert saved_steps(progress) == [250]
    kept = progress.with_name("progress.damaged-steps") / "damaged-step-00000007"
    assert (kept / "rank-00000-00000.safetensors").is_file()


def test_accept_with_nothing_set_aside_is_refused(tmp_path: Path) -> None:
    """A mistyped phase is answered, and nothing is made for it."""
    phase = tmp_path / "results/run/plain"
    assert f"{phase}: no progress was set aside" in refusal(accept, phase)
    assert not phase.exists()


def test_accept_during_a_training_is_refused(progress: Path) -> None:
    """Checkpoints are not moved away from under a training."""
    save(progress, 100)
    start(progress, EDITED)
    held = take(progress)
    with pytest.raises(PipelineError, match="a training is running here already"):
        accept(progress.parent)
    assert len(aside(progress)) == 1
    held.release()
