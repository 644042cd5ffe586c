"""A progress folder from somebody else: links, pipes and folders where its files should be.

What is written stays in the folder: no link is written through. What is read counts as missing, and
a start refuses the folder with a sentence that names the entry; nothing waits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save
from tests.builders.phases import make_phase, make_tiny_phase
from tests.builders.refusals import refused
from tests.hostile.fuzzing import limits

from zerotrain.artifact import leftovers
from zerotrain.errors import PipelineError
from zerotrain.machine import child_process, output
from zerotrain.machine.file_lock import hold, is_held
from zerotrain.machine.pid_space import pid_space
from zerotrain.machine.processes import this_process
from zerotrain.training.checkpointing import progress_folder, set_aside
from zerotrain.training.process import ending, lock, stop, swap_folder
from zerotrain.training.process.start import prepare
from zerotrain.training.reporting import decode_samples, heartbeat, trackers, validation_history
from zerotrain.training.reporting.event_files import EventFile
from zerotrain.training.reporting.log import Log
from zerotrain.training.reporting.samples import LatentSampler

VICTIM = b"what must stay"
TEXT = "echo this is a program\n"
KINDS = ("link", "dangling", "folder", "pipe")


@pytest.fixture(autouse=True)
def _soon() -> Iterator[None]:
    """Nothing here waits."""
    with limits(5):
        yield


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file outside, with a folder next to it."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/kept").write_bytes(VICTIM)
    (tmp_path / "victim").write_bytes(VICTIM)
    return tmp_path / "victim"


@pytest.fixture
def progress(tmp_path: Path) -> Path:
    (tmp_path / "progress").mkdir()
    return tmp_path / "progress"


def put(place: Path, kind: str, victim: Path) -> None:
    """Put something that is no file in a file's place."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if kind == "folder":
        place.mkdir()
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(victim if kind == "link" else victim.with_name("made"))


def check_untouched(victim: Path) -> None:
    """Nothing outside has changed, and nothing was made there."""
    assert victim.read_bytes() == VICTIM
    assert (victim.parent / "outside/kept").read_bytes() == VICTIM
    assert [*(victim.parent / "outside").iterdir()] == [victim.parent / "outside/kept"]
    assert not victim.with_name("made").exists()


def find_refusal(write: Callable[[Path], Any], progress: Path, default: str = "") -> str:
    """What is refused, if anything is."""
    try:
        write(progress)
    except (PipelineError, OSError) as error:
        return str(error)
    return default


def phase(**values: Any) -> Any:
    return make_tiny_phase("a", "torch", 20).with_values(report_to=[], **values)


def open_log(progress: Path, records: Path | None = None, **values: Any) -> Log:
    return Log(progress, phase(**values), records, 0, 0, torch.device("cpu"), same_phase=True)


def write_log(progress: Path) -> None:
    """The log of a checkpoint is a text that somebody chose."""
    records = progress / "step-00000004/records"
    records.mkdir(parents=True)
    (records / "metrics.jsonl").write_text(TEXT)
    open_log(progress, records).close()


def write_statuses(progress: Path) -> None:
    heartbeat.Heartbeat(progress, 0).close()


def write_tensorboard(progress: Path) -> None:
    board = trackers.TensorBoard(phase(), progress, 0)
    board.log({"train/loss": 1.0}, 1)
    board.close()


def write_samples(progress: Path) -> None:
    made = LatentSampler.__new__(LatentSampler)
    said = SimpleNamespace(say=lambda text: None)
    made.__dict__ |= {
        "_folder": progress / "samples", "_log": said, "_prompts": ["a"], "_columns": 1,
    }  # fmt: skip
    made._folder.mkdir(exist_ok=True)
    made._write(4, torch.zeros(1, 4, 8, 8))


def write_images(progress: Path) -> None:
    """A family whose images are all black."""
    image = Image.new("RGB", (8, 8))
    family: Any = SimpleNamespace(decode_latents=lambda base, latents, device: [image])
    decode_samples.decode(progress / "samples", family, progress, "cpu")


def start_writing(progress: Path) -> None:
    """Images need latents to be decoded."""
    samples = progress / "samples"
    if not os.path.lexists(samples):
        samples.mkdir()
    write_samples(progress)
    write_images(progress)


def write_output(progress: Path) -> None:
    child_process.supervise(["true"], log=progress / "train.log")


def write_detail(progress: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(output.LOG, str(progress / "train.log"))
        output.print_detail("a line")


def write_best(progress: Path) -> None:
    validation_history.write_best(progress, {"step": 4, "metric": "val_loss", "value": 1.0})


def stop_by_signal(progress: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop, "handled_signals", lambda: [])
        stop.StopRequest(progress, tell=True)._note(15, None)


def write_codes(progress: Path) -> None:
    ending.write_exit_codes(progress, 0, {0: 1})


def write_ending(progress: Path) -> None:
    ending.write_exit_record(progress, 2, "reason")


def take_lock(progress: Path) -> None:
    lock.take(progress, seconds=60).release()


def accept(progress: Path) -> None:
    set_aside.write_accepted(progress, {"seed": 1})


Writer = Callable[[Path], None]
WRITERS: list[tuple[str, Writer]] = [
    ("metrics.jsonl", write_log),
    ("stop", stop_by_signal),
    ("ended-0.json", write_codes),
    ("exit.json", write_ending),
    ("exit.json.new-{host}-{pid}", write_ending),
    ("best.json", write_best),
    (".best.json.new", write_best),
    ("accepted.json", accept),
    ("lock", take_lock),
    ("lock.taking", take_lock),
    ("lock.new-{space}-{pid}", take_lock),
    ("ranks/00000.json", write_statuses),
    ("ranks/00000.new", write_statuses),
    ("tensorboard/last_step.json", write_tensorboard),
    ("tensorboard/last_step.new", write_tensorboard),
    ("samples/.step-00000004.safetensors.new", start_writing),
    ("samples/step-00000004.safetensors", start_writing),
    ("samples/step-00000004/00-00.png", start_writing),
    ("samples/.step-00000004.png.new", start_writing),
    ("train.log", write_output),
    ("train.log", write_detail),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "write"), WRITERS, ids=lambda one: getattr(one, "__name__", one))
def test_nothing_is_written_through_an_entry(
    progress: Path, victim: Path, name: str, write: Writer, kind: str
) -> None:
    """It is replaced, or named in a sentence; the target of a link stays, byte for byte."""
    name = name.format(host=os.uname().nodename, space=pid_space(), pid=os.getpid())
    put(progress / name, kind, victim)
    assert name in find_refusal(write, progress, default=name)
    check_untouched(victim)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("tensorboard", write_tensorboard),
        ("tensorboard", lambda progress: EventFile(progress / "tensorboard", 0).close()),
        ("tensorboard/samples", start_writing),
        ("ranks", write_statuses),
        ("samples/step-00000004", start_writing),
    ],
    ids=["trackers", "event file", "images' board", "ranks", "images"],
)
def test_no_folder_is_filled_through_a_link(
    progress: Path, victim: Path, name: str, write: Writer
) -> None:
    """A folder of the user's own gets no file."""
    (progress / name).parent.mkdir(exist_ok=True)
    (progress / name).symlink_to(victim.parent / "outside")
    assert f"{progress / name}: is a link, not a folder" in refused(write, progress).what
    check_untouched(victim)


READERS: list[tuple[str, Callable[[Path], Any], Any]] = [
    ("lock", lock.read_owner, None),
    ("lock", stop.trainer_of, None),
    ("lock", lock.check_not_locked, None),
    ("exit.json", ending.read_exit_record, None),
    ("ended-0.json", ending.read_exit_codes, {}),
    ("ranks/00000.json", heartbeat.read_statuses, []),
    ("best.json", validation_history.best_step, None),
    ("finished.json", lambda progress: validation_history.finished_step(progress, None, 9), None),
    ("accepted.json", set_aside.read_accepted, None),
    (
        "tracker-wandb.json",
        lambda progress: trackers._read(progress / "tracker-wandb.json").run,
        None,
    ),
    (
        "step-00000004/manifest.json",
        lambda progress: leftovers.hold(progress / "step-00000004"),
        None,
    ),
    (
        "step-00000004/manifest.json",
        lambda progress: leftovers.is_held(progress / "step-00000004"),
        False,
    ),
    ("owner.json", lambda progress: is_held(progress / "owner.json"), None),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "read", "missing"),
    READERS,
    ids=[f"{n} {number}" for number, (n, *_) in enumerate(READERS)],
)
def test_what_is_no_file_counts_as_missing(
    progress: Path, victim: Path, name: str, read: Callable[[Path], Any], missing: Any, kind: str
) -> None:
    """For all that only look at a run."""
    put(progress / name, kind, victim)
    assert read(progress) == missing
    check_untouched(victim)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["lock", "lock.taking", "lock.writer"])
def test_a_start_names_what_is_no_lock(progress: Path, victim: Path, name: str, kind: str) -> None:
    """And takes it from no one."""
    put(progress / name, kind, victim)
    take = lock.hold_writer if name == "lock.writer" else lock.take
    assert refused(take, progress).what.startswith(f"{progress / name}: is a ")
    assert os.path.lexists(progress / name)
    refused(hold, progress / name)


STARTED = [
    "stop", "exit.json", "ended-3.json", "best.json", "finished.json", "accepted.json",
    "metrics.jsonl", "tracker-wandb.json",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STARTED)
def test_a_start_refuses_what_is_no_file(
    progress: Path, victim: Path, name: str, kind: str
) -> None:
    """Before anything is removed or set aside."""
    put(progress / name, kind, victim)
    inputs: Any = SimpleNamespace(phase=make_phase(), parents={}, trains={})
    assert refused(prepare, inputs, progress).what.startswith(f"{progress / name}: is a ")
    check_untouched(victim)


@pytest.mark.parametrize("name", ["tensorboard", "ranks", "samples", "step-00000004", ".step-1.x"])
def test_a_start_refuses_a_link_to_a_folder(progress: Path, victim: Path, name: str) -> None:
    """Checkpoints and curves would be written there."""
    (progress / name).symlink_to(victim.parent / "outside")
    inputs: Any = SimpleNamespace(phase=make_phase(), parents={}, trains={})
    assert refused(prepare, inputs, progress).what.startswith(f"{progress / name}: is a link")
    check_untouched(victim)


def test_progress_that_is_taken_back_keeps_what_a_link_names(progress: Path, victim: Path) -> None:
    """Only the link is removed."""
    (progress / "tensorboard").symlink_to(victim.parent / "outside")
    stale = progress.with_name("progress.stale-0")
    (stale / "step-00000002").mkdir(parents=True)
    set_aside.take_back(progress, stale)
    assert [path.name for path in progress.iterdir()] == ["step-00000002"]
    check_untouched(victim)


@pytest.mark.parametrize("odd", ["[" * 100_000, "NaN", '{"step": NaN}', f'{{"step": {"9" * 400}}}'])
def test_odd_numbers_and_deep_lists_count_as_missing(progress: Path, odd: str) -> None:
    """In every record of a progress folder."""
    for name, read, missing in READERS[:10]:
        (progress / name).parent.mkdir(exist_ok=True)
        (progress / name).write_text(odd)
        assert read(progress) == missing
        (progress / name).unlink()


@pytest.mark.parametrize("pid", [0, -1, -17, 2**31, "x"])
def test_no_process_has_this_id(progress: Path, pid: Any) -> None:
    """0 and negative numbers are groups of processes to kill(2)."""
    process = {**asdict(this_process(60)), "pid": pid}
    (progress / "lock").write_text(json.dumps(process))
    assert lock.read_owner(progress) is None
    status = heartbeat.RankStatus(1, this_process(), 3, "a.py:1 (f)", False, 0.5, 9.0)
    (progress / "ranks").mkdir()
    (progress / "ranks/00001.json").write_text(json.dumps({**asdict(status), "process": process}))
    assert heartbeat.read_statuses(progress) == []


@pytest.mark.parametrize(("code", "name"), [(-32, "signal 32"), (-9, "SIGKILL")])
def test_a_signal_without_a_name_ends_in_a_sentence(progress: Path, code: int, name: str) -> None:
    """Python names some signals only."""
    (progress / "ended-0.json").write_text(json.dumps({"0": code}))
    assert f"was killed by {name}" in ending.LaunchDeath().explain("p", progress, 9, 1, []).what


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("resources.json", "[]"),
        ("resources.json", '{"train_seconds": "soon"}'),
        ("resources.json", '{"train_seconds": NaN}'),
        ("resources.json", "x"),
        ("pending.json", "{}"),
        ("pending.json", '{"steps": [[1]], "epoch": [0, 0, 0]}'),
        ("pending.json", '{"steps": [], "epoch": [0, 1e999, 0]}'),
        ("pending.json", '{"steps": [], "epoch": ["a", 0, 0]}'),
    ],
)
def test_an_odd_record_of_a_checkpoint_is_named(progress: Path, name: str, text: str) -> None:
    """The training says which, and does not start."""
    records = progress / "step-00000004/records"
    records.mkdir(parents=True)
    (records / name).write_text(text)
    assert refused(open_log, progress, records).what.startswith(f"{records / name}: ")


@pytest.mark.parametrize(
    "text",
    ["x", "[]", "{}", '{"began": 0, "measured": [{"val_loss": 1}]}', '{"began": 0, "measured": 1}',
     '{"began": 0, "measured": [{"step": 1, "val_loss": "low"}]}', '{"began": 0, "more": 1}'],
)  # fmt: skip
def test_an_odd_history_of_validations_is_named(progress: Path, text: str) -> None:
    """Or read, where the key only belongs to another version."""
    file = progress / "step-00000004/records/validation.json"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    if "more" in text:
        assert validation_history.read_history(progress / "step-00000004") is not None
    else:
        what = refused(validation_history.read_history, progress / "step-00000004").what
        assert what.startswith(f"{file}: ")


@pytest.mark.parametrize(
    "line", ["x", "[1]", '{"step": 3}', '{"phase": "a", "step": "3"}',
             '{"phase": "a", "step": 3, "loss": "low", "samples": 1}',
             '{"phase": "a", "step": 9223372036854775808, "loss": 1}']
)  # fmt: skip
def test_odd_lines_of_a_log_end_in_a_sentence_or_give_no_point(progress: Path, line: str) -> None:
    """TensorBoard gets what has a step and numbers."""
    (progress / "metrics.jsonl").write_text(line + "\n")
    (progress / "tensorboard").mkdir()
    (progress / "tensorboard/last_step.json").write_text('{"step": 0}')
    what = find_refusal(write_tensorboard, progress)
    assert what.startswith(f"ERROR: {progress / 'metrics.jsonl'}: line 1: ") == (
        line in ("x", "[1]")
    )
    assert bool(what) == (line in ("x", "[1]"))


def test_a_swap_folder_with_an_odd_owner_is_left_alone(tmp_path: Path, victim: Path) -> None:
    """Also where its owner file is a pipe, a link or no process."""
    for kind in KINDS:
        put(tmp_path / f"swap/zerotrain-{kind}/owner.json", kind, victim)
    (tmp_path / "swap/zerotrain-pid").mkdir()
    owner = {**asdict(this_process()), "pid": 0}
    (tmp_path / "swap/zerotrain-pid/owner.json").write_text(json.dumps(owner))
    messages = swap_folder.clear_dead(tmp_path / "swap")
    assert len(messages) == len(KINDS) + 1
    assert all("left alone, its owner.json" in message for message in messages)
    check_untouched(victim)


def test_a_short_log_restores_no_record(progress: Path) -> None:
    """A manifest names more bytes than any memory has."""
    (progress / "metrics.jsonl").write_text("{}\n")
    entry = {"bytes": 2**62, "sha256": ""}
    place = progress / "step-00000004/records/metrics.jsonl"
    assert not progress_folder._restore(place, progress / "metrics.jsonl", entry)


@pytest.mark.parametrize("kind", ["text", "pipe", "no prompts"])
def test_odd_latents_end_no_training(progress: Path, victim: Path, kind: str) -> None:
    """Images that are decoded in the training's own process."""
    place = progress / "samples/step-00000004.safetensors"
    place.parent.mkdir()
    if kind == "no prompts":
        place.write_bytes(save({"latents": torch.zeros(1)}, metadata={"columns": "1"}))
    elif kind == "text":
        place.write_text(TEXT)
    else:
        put(place, kind, victim)
    made, said = LatentSampler.__new__(LatentSampler), []
    made.__dict__ |= {
        "_folder": place.parent, "_log": SimpleNamespace(say=said.append), "_decode": "inline",
        "_family": None, "_base": progress, "_engine": SimpleNamespace(device="cpu"),
    }  # fmt: skip
    made._start_decoding()
    assert len(said) == 1
    assert f"images not written: {place}: " in said[0]
