"""What differs or would be lost is reported in a sentence before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.builders.phases import make_phase, make_tiny_phase
from tests.builders.refusals import refusal

from zerotrain import artifact
from zerotrain.artifact.recipe import Difference
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.training.checkpointing.conditions import RecordedConditions, changes
from zerotrain.training.checkpointing.preflight import check_progress, check_start, switch_command
from zerotrain.training.reporting.validation_history import write_finished

POSITION = {
    "run": "cats", "phase": "plain", "step": 250, "samples": 1000, "optimizer": "adamw",
    "optimizer_step": 250, "param_groups": [], "lr_scheduler": "constant",
    "lr_scheduler_steps": 300, "rng": {}, "engine": {}, "loss_scale": None, "ran_on": {},
    "history": [],
}  # fmt: skip
ADAM = ["master", "exp_avg", "exp_avg_sq"]


def state(folder: Path, slots: list[str], **changes: Any) -> artifact.Artifact:
    """A state's JSON without its tensors."""
    with artifact.publish(folder / "state", "state") as draft:
        document = {**POSITION, **changes, "slots": {slot: {} for slot in slots}}
        artifact.write_json(draft.folder / "state.json", document)
    return artifact.read(folder / "state", "state")


def changed(now: ResolvedPhase) -> list[Difference]:
    """What a phase has otherwise than the one that was trained."""
    return changes(RecordedConditions(make_phase().numbers(), {}), now.numbers())


@pytest.fixture
def progress(tmp_path: Path) -> Path:
    """Progress of 250 steps by plain PyTorch."""
    folder = tmp_path / "progress"
    (folder / "step-00000250").mkdir(parents=True)
    (folder / "step-00000250" / "manifest.json").write_text("{}")
    return folder


def test_progress_of_the_same_launch_continues(progress: Path) -> None:
    """Other values than the launch are not this check's: such progress is set aside."""
    check_progress(progress, changed(make_phase()), make_phase())
    other = make_phase(learning_rate=1.0)
    check_progress(progress, changed(other), other)


def test_progress_of_another_launch_names_the_switch(progress: Path) -> None:
    """Each value that differs, as it was and as it is, and the command that continues."""
    other = make_phase("zero2_offload", num_processes=2, mixed_precision="bf16")
    assert refusal(check_progress, progress, changed(other), other) == (
        f"ERROR: {progress}: its 250 steps were trained under another launch than phase plain has "
        "now: engine torch, now deepspeed; ZeRO stage 0, now 2; optimizer offload none, now cpu; "
        "processes 1, now 2; precision no, now bf16\n"
        "  Hint: `zerotrain switch cats --to zero2_offload --num-processes 2 "
        "--mixed-precision bf16` ends the phase at step 250, exports it "
        "and continues from there in a new phase, with nothing lost; to train this phase from its "
        f"start instead, move {progress} away"
    )


def test_a_phase_that_ended_early_is_trained_to_its_end(progress: Path) -> None:
    """Nothing is left to switch: the next phase begins where a validation ended this one."""
    rule = {"early_stopping_patience": 2}
    write_finished(progress, 250, "no better", rule)
    early = make_phase("zero3", validation=rule)
    text = refusal(check_progress, progress, changed(early), early)
    assert "the phase is trained to its end: write its former launch back" in text
    other = make_phase("zero3", validation=None)
    assert "ends the phase at step 250" in refusal(check_progress, progress, changed(other), other)


def test_nothing_saved_may_change_its_launch(progress: Path) -> None:
    """Without a checkpoint there is nothing to lose."""
    (progress / "step-00000250" / "manifest.json").unlink()
    other = make_phase("zero3")
    check_progress(progress, changed(other), other)


@pytest.mark.parametrize(
    ("before", "slots", "after", "arguments", "what"),
    [
        ("adamw", ADAM, "adamw", {}, ""),
        ("adam", ADAM, "adamw", {}, ""),
        ("adamw", ADAM, "adam", {}, ""),
        ("nadam", ADAM, "adamw", {}, "the state of nadam has exp_avg and exp_avg_sq"),
        ("adamw", ADAM, "sgd", {}, "sgd continues nothing, but the state of adamw has exp_avg"),
        ("sgd", ["master"], "sgd", {}, ""),
        ("sgd", ["master", "momentum_buffer"], "adamw", {}, "adamw continues exp_avg and "
         "exp_avg_sq, but the state of sgd has momentum_buffer"),
        ("", ["master"], "adamw", {}, "the state of an unknown optimizer has weights alone"),
        ("", ["master"], "sgd", {}, ""),
        ("sgd", ["master"], "sgd", {"momentum": 0.9}, "sgd continues momentum_buffer"),
        ("adamw", ADAM, "adamw", {"amsgrad": True}, "exp_avg_sq and max_exp_avg_sq, but"),
    ],
)  # fmt: skip
def test_each_optimizer_continues_its_own_slots(
    tmp_path: Path, before: str, slots: list[str], after: str, arguments: dict[str, Any], what: str
) -> None:
    """Adam and AdamW each other's; where something is lost the sentence says what there is."""
    found = state(tmp_path, slots, optimizer=before)
    chosen = make_phase(optimizer=after, optimizer_args=arguments)
    if not what:
        assert check_start(found, chosen) == []
    else:
        text = refusal(check_start, found, chosen)
        assert what in text
        assert "write `allow: [moments]` into the phase plain" in text
        (said,) = check_start(found, chosen.with_values(allow=["moments"]))
        assert said.endswith("the optimizer state would be reset; allowed")


def test_an_optimizer_before_its_first_update_has_nothing_to_lose(tmp_path: Path) -> None:
    """As after fp16's first overflows: no slots, and the same optimizer."""
    found = state(tmp_path, ["master"], optimizer_step=0)
    assert check_start(found, make_phase()) == []
    text = refusal(check_start, found, make_phase(optimizer="lion"))
    assert "lion continues exp_avg" in text


def test_a_loss_scale_is_kept_by_fp16_alone(tmp_path: Path) -> None:
    """Between fp16 engines nothing is lost; to another precision the scale is."""
    found = state(tmp_path, ADAM, loss_scale={"scale": 512.0, "good_steps": 3})
    assert check_start(found, make_phase(mixed_precision="fp16")) == []
    text = refusal(check_start, found, make_phase(mixed_precision="bf16"))
    assert "fp16 loss scale 512 is of no use to precision bf16" in text
    assert "allow: [loss_scale]" in text
    assert len(check_start(found, make_phase(mixed_precision="bf16", allow=["loss_scale"]))) == 1


def test_averaged_weights_are_not_dropped_in_silence(tmp_path: Path) -> None:
    """A state may carry them before any phase does."""
    found = state(tmp_path, [*ADAM, "ema"])
    assert "allow: [ema]" in refusal(check_start, found, make_phase())


@pytest.mark.parametrize(
    ("differing", "options"),
    [
        ({"zero_stage", "engine"}, "--to zero2"),
        ({"num_processes"}, "--num-processes 4"),
        ({"mixed_precision", "num_processes"}, "--num-processes 4 --mixed-precision bf16"),
        ({"offload_param", "num_processes"}, "--to zero2 --num-processes 4"),
        ({"global_batch_size"}, "--to zero2"),
        ({"global_batch_size", "mixed_precision"}, "--mixed-precision bf16"),
    ],
)
def test_each_difference_has_its_option_of_the_command_that_continues(
    differing: set[str], options: str
) -> None:
    """Nothing that is the same is named."""
    phase = make_tiny_phase("a", "zero2", 5).with_values(num_processes=4, mixed_precision="bf16")
    assert switch_command(phase, differing) == f"zerotrain switch tiny {options}"
