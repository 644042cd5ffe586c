"""A full or read-only disk under every command that writes: a sentence, and nothing is lost.

The disks are small ones in memory, mounted for the test; a machine that does not let us mount them
skips these tests. Those that let the system's calls fail instead run everywhere.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import gc
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tests.builders.runs import make_run
from tests.builders.settings import write_settings
from tests.builders.states import make_position
from tests.conftest import ROOT, Mount
from tests.stages import test_evaluate

from zerotrain import artifact, cli
from zerotrain.artifact import create, replacing, write_json, write_whole
from zerotrain.config.read import read_config
from zerotrain.config.stage_settings import SETTINGS
from zerotrain.data.sheets import draw_grid
from zerotrain.errors import EXIT_USER_ERROR, PipelineError
from zerotrain.export.command import check_replaceable
from zerotrain.export.options import PublishOptions
from zerotrain.export.publish import publish
from zerotrain.graph.cluster import profile
from zerotrain.graph.dvc import pipeline
from zerotrain.machine import disk_errors
from zerotrain.machine.child_process import supervise
from zerotrain.machine.disk_errors import check_writable
from zerotrain.models.families import autoencoders
from zerotrain.stages.export_weights import ExportSettings, export_weights
from zerotrain.state.checkpoint import KIND, Fragment, write_position, write_rank
from zerotrain.state.position import ADAM_SLOTS, MASTER
from zerotrain.training.checkpointing.conditions import manifest_content

run = test_evaluate.run
Words = Callable[[Path, Path], list[object]]
"""A command line, of the folder with its inputs and the one on the disk in which it writes."""


@pytest.fixture(scope="module")
def inputs(run: Path) -> Path:
    """What the commands read: a run of nano models, its configuration, and a checkpoint."""
    raw = make_run(
        run="houses",
        data={"images": str(run / "images"), "holdout": 0.5, "num_workers": 0},
        train={"resolution": 16},
        launch={"num_cpu_threads_per_process": 1},
        phases=[{"name": "only", "until": 20, "launch": "torch"}],
        evaluate={
            "images_per_prompt": 1,
            "num_inference_steps": 1,
            "judge": "nearest_neighbour",
        },
    )
    (run / "run.yaml").write_text(yaml.safe_dump(raw))
    (run / "other.yaml").write_text(yaml.safe_dump({**raw, "cache": {"dtype": "bf16"}}))
    (run / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    tensors = load_file(run / "base/unet/diffusion_pytorch_model.safetensors")
    slots = [MASTER, *ADAM_SLOTS]
    group = {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0}
    groups = [{**group, "parameters": sorted(tensors)}]
    position = make_position(20, run="houses", phase="only", param_groups=groups)
    with artifact.publish(run / "checkpoint", KIND) as draft:
        share = [
            Fragment(name, 0, dict.fromkeys(slots, t.flatten().abs()))
            for name, t in tensors.items()
        ]
        spans = [write_rank(draft.folder, 0, share)]
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        write_position(draft.folder, position, shapes, slots, spans)
        draft.content = manifest_content({})
    config = read_config(run / "run.yaml")
    of_other = read_config(run / "other.yaml")
    for name in SETTINGS:
        phase = "only" if name in ("evaluate", "render_launch") else ""
        file = write_settings(run / "settings/run" / f"{name}.json", name, config, phase)
        write_settings(run / "settings/other" / f"{name}.json", name, of_other, phase)
        again = {**json.loads(file.read_text()), "rebuild": "now"}
        (run / "settings/again").mkdir(exist_ok=True)
        write_json(run / "settings/again" / f"{name}.json", again)
    with artifact.publish(run / "only/launch", "launch"):
        pass
    settings = ExportSettings.of(config)
    export_weights(settings, run / "checkpoint", run / "base", run / "trained", run / "moments")
    with artifact.publish(run / "only/evaluation", "evaluation") as draft:
        for name in ("loss", "learning_rate"):
            Image.new("RGB", (8, 8), "red").save(draft.folder / f"{name}.png")
        grid = draw_grid(["a red house"], [[Image.new("RGB", (8, 8), "red")]])
        grid.save(draft.folder / "grid.png")
        draft.content = {"prompts": ["a red house"]}
    (run / "only/metrics.json").write_text(json.dumps({"step": 20}))
    return run


def stage(name: str, config: str, *words: str) -> Words:
    """A stage's command line, in which @NAME is an input and %NAME lies on the disk."""
    return of(name, "--settings", f"@settings/{config}/{name}.json", *words)


def twice(name: str, *words: str) -> tuple[Words, Words]:
    """A stage's command line, and again one by which it makes its folders though they are there."""
    return stage(name, "run", *words), stage(name, "again", *words)


def of(*words: str) -> Words:
    """A command line, in which @NAME is an input and %NAME lies on the disk."""

    def given(inputs: Path, disk: Path) -> list[object]:
        places = {"@": inputs, "%": disk}
        return [places[word[0]] / word[1:] if word[:1] in places else word for word in words]

    return given


DATASET, BASE, CACHE = ("--dataset", "@dataset"), ("--base", "@base"), ("--cache", "@cache")
EVALUATE = (
    *DATASET, *CACHE, "--weights", "@weights", "--state", "@state",
    "--output", "%evaluation", "--metrics", "%metrics.json",
)  # fmt: skip
EXPORT = ("export", "@checkpoint", "--family", "sdxl", *BASE)
COMMANDS: dict[str, tuple[Words, Words]] = {
    "prepare_dataset": twice("prepare_dataset", "--output", "%data"),
    "build_base": twice("build_base", *DATASET, "--output", "%base"),
    "cache_latents": (
        stage("cache_latents", "run", "--size", "16", *DATASET, *BASE, "--output", "%cache"),
        stage("cache_latents", "other", "--size", "16", *DATASET, *BASE, "--output", "%cache"),
    ),
    "render_launch": twice(
        "render_launch", *DATASET, "--preset", str(ROOT / "config/launch/torch.yaml"),
        "--output", "%launch",
    ),
    "export_weights": twice(
        "export_weights", "--checkpoint", "@checkpoint", *BASE, "--weights", "%weights",
        "--state", "%state",
    ),
    "import_checkpoint": twice(
        "import_checkpoint", "--checkpoint", "@checkpoint", *BASE, "--state", "%imported"
    ),
    "evaluate": twice("evaluate", *EVALUATE),
    "report": twice("report", "--config", "@run.yaml", "--output", "%report", "@only"),
    "export": (of(*EXPORT, "--output", "%out"),) * 2,
    "export --state": (of("export", "@checkpoint", "--state", "%state"),) * 2,
    "export --to universal": (
        of("export", "@checkpoint", "--to", "universal", "--output", "%universal"),
    ) * 2,
    "export --to single_file": (of(*EXPORT, "--to", "single_file", "--output", "%out"),) * 2,
    "export of weights": (of("export", "@trained", "--to", "ldm", "--output", "%out"),) * 2,
    "sample": (of("sample", "@weights", "a wall", "--steps", "1", "--out", "%png"),) * 2,
    "publish": (
        of("publish", "@trained", "me/walls", "--dry-run", "--card", "%card"),
        of("publish", "@trained", "me/walls", "--dry-run", "--card", "%other"),
    ),
    "sweep": (
        of("sweep", "@run.yaml", "--set", "seed=1,2", "--output", "%a"),
        of("sweep", "@run.yaml", "--set", "seed=1,2", "--output", "%b"),
    ),
    "launch import": (
        of("launch", "import", "@zero.json", "--precision", "bf16", "--num-processes", "1",
           "--micro-batch-size", "1", "--output", "%a.yaml"),
        of("launch", "import", "@zero.json", "--precision", "bf16", "--num-processes", "1",
           "--micro-batch-size", "1", "--output", "%b.yaml"),
    ),
    "fetch": (of("fetch", "@run.yaml", "--to", "%fetched"),) * 2,
}  # fmt: skip
"""Each with what is called first, and what is called again on a disk that does not take it."""
LIKE_OTHERS = (
    "import_checkpoint", "export", "export --state", "export --to single_file", "publish", "sweep",
    "fetch",
)  # fmt: skip
"""Those that write as others do, which stand for them on a full disk in `make test-full`."""
NUMBERS = (errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
"""What the system says, in turn."""


def call(words: list[object], monkeypatch: pytest.MonkeyPatch) -> int:
    """Be the command; its exit code."""
    monkeypatch.setattr(sys, "argv", ["zerotrain", *map(str, words)])
    monkeypatch.setattr(autoencoders, "VAE_STEPS", 2)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


WAITING = ("cache/partial", "cache/partial/*.safetensors", "cache/partial/encoding.json")


def contents(folder: Path) -> dict[str, bytes | None]:
    """Bytes of every file below a folder, by name; a folder has none.

    Finished shards wait in a cache's `partial` for the next call, which takes them; a record there
    says what encoded them.
    """
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if not any(map(path.match, WAITING))
    }


def check_refused(code: int, said: str, disk: Path, trouble: str) -> None:
    """An ERROR that names a path on the disk and the trouble, and a Hint; code 2."""
    assert code == EXIT_USER_ERROR, said
    error, hint = said.splitlines()[-2:]
    assert error.startswith(f"ERROR: {disk}"), said
    assert trouble in error
    assert hint.startswith("  Hint: ")
    assert hint.endswith("then run the same command again")
    assert "Traceback" not in said


def fill(disk: Path, leave: int) -> None:
    """Write into a file until so many bytes are free, and the rest in parts of a page."""
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as stream:
        while (free := shutil.disk_usage(disk).free) > leave:
            stream.write(b"x" * min(1 << 20, free - leave))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=pytest.mark.soak if one in LIKE_OTHERS else ()) for one in COMMANDS],
)
def test_a_disk_that_takes_no_more(
    name: str, inputs: Path, tmp_path: Path, mount: Mount, monkeypatch, capfd
) -> None:
    """Full from the start, full in the middle of the work, and read-only: one sentence, exit code
    2, the former output has its bytes, and nothing else is left there."""
    first, again = COMMANDS[name]
    monkeypatch.chdir(tmp_path)
    disk = tmp_path / "disk"
    (tmp_path / "config").symlink_to(ROOT / "config")
    mount(disk, "size=512m")
    assert call(first(inputs, disk), monkeypatch) == 0, capfd.readouterr()
    written = shutil.disk_usage(disk).used
    mount(disk, f"size={2 * written + (1 << 20)}")
    former = contents(disk)
    for leave in (0, written // 4):
        fill(disk, leave)
        code = call(again(inputs, disk), monkeypatch)
        check_refused(code, capfd.readouterr().err, disk, "No space left on device (")
        (disk / "filler").unlink()
        assert contents(disk) == former
    gc.collect()  # what torch could not write it closes when its writer is collected
    mount(disk, "ro")
    code = call(again(inputs, disk), monkeypatch)
    check_refused(code, capfd.readouterr().err, disk, "Read-only file system")
    mount(disk, "rw,size=512m")
    assert contents(disk) == former
    assert call(again(inputs, disk), monkeypatch) == 0, capfd.readouterr()


@pytest.mark.parametrize(
    ("name", "number"), list(zip(COMMANDS, itertools.cycle(NUMBERS), strict=False))
)
def test_a_system_that_writes_nothing(
    name: str, number: int, inputs: Path, tmp_path: Path, monkeypatch, capfd
) -> None:
    """Whatever the system says where the first folder or file is to be made."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "mine.txt").write_text("mine")
    (tmp_path / "config").symlink_to(ROOT / "config")
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        break_writing(disk, number, patched)
        code = call(COMMANDS[name][0](inputs, disk), patched)
    check_refused(code, capfd.readouterr().err, disk, os.strerror(number))
    assert contents(disk) == {"mine.txt": b"mine"}


def break_writing(disk: Path, number: int, patched: pytest.MonkeyPatch) -> None:
    """Let nothing be made below a folder."""
    plain_open, plain_io, mkdir = os.open, io.open, os.mkdir

    def refuse(path: object) -> None:
        if isinstance(path, str | os.PathLike) and Path(path).absolute().is_relative_to(disk):
            raise OSError(number, os.strerror(number), str(path))

    def open_(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            refuse(path)
        return plain_open(path, flags, *rest, **options)

    def io_open(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if set(mode) & set("wax+"):
            refuse(file)
        return plain_io(file, mode, *rest, **options)

    def make(path: Any, *rest: Any, **options: Any) -> None:
        refuse(path)
        mkdir(path, *rest, **options)

    patched.setattr(os, "open", open_)
    patched.setattr(io, "open", io_open)
    patched.setattr(builtins, "open", io_open)
    patched.setattr(os, "mkdir", make)


def test_a_program_fault_is_no_disk_error(monkeypatch) -> None:
    """Other errors of the system and of the libraries keep their tracebacks; an error of the disk
    that a library raised from another counts."""
    for error in (
        FileNotFoundError(errno.ENOENT, "No such file", "a"),
        OSError("odd"),
        PermissionError(errno.EPERM, "Operation not permitted"),
        RuntimeError("failed with an index out of range"),
        RuntimeError("No space left on device"),
        SafetensorError("Error while deserializing: header too small"),
        KeyError("[Errno 28]"),
    ):
        assert disk_errors.explain(error) is None

        def fail(error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(cli, "command_line", lambda words: fail)
        with pytest.raises(type(error)):
            cli.main()
    wrapped = ValueError("cannot save")
    wrapped.__cause__ = OSError(errno.ENOSPC, "No space left on device", "/nowhere/a")
    found = disk_errors.explain(wrapped)
    assert found is not None
    assert found.errno == errno.ENOSPC
    assert found.what.startswith("/nowhere/a: cannot be written: No space left on device (")


@pytest.mark.slow
def test_libraries_that_wrap_the_systems_error(tmp_path: Path, mount: Mount) -> None:
    """safetensors, torch's two formats, Pillow, shutil and pyarrow on a full and a read-only disk:
    the file or folder that was being written is named, never the one that was read."""
    import pyarrow
    from pyarrow import parquet

    large, place = tmp_path / "source", tmp_path / "disk" / "made"
    large.mkdir()
    (large / "a").write_bytes(os.urandom(1 << 20))
    tensors = {"a": torch.rand(1 << 18)}
    noise = Image.frombytes("RGB", (512, 512), os.urandom(512 * 512 * 3))
    table = pyarrow.table({"a": list(range(1 << 17))})
    writers: dict[str, Callable[[], object]] = {
        "safetensors": lambda: save_file(tensors, place / "a.safetensors"),
        "torch": lambda: torch.save(tensors, place / "a.pt"),
        "legacy": lambda: torch.save(tensors, place / "a.pt", _use_new_zipfile_serialization=False),
        "pillow": lambda: noise.save(place / "a.png"),
        "copy": lambda: shutil.copy2(large / "a", place / "a"),
        "copytree": lambda: shutil.copytree(large, place / "tree"),
        "pyarrow": lambda: parquet.write_table(table, place / "a.parquet"),
    }
    mount(place.parent, "size=64k")
    place.mkdir()
    for options, trouble in (("rw", "No space left on device"), ("ro", "Read-only file system")):
        gc.collect()
        mount(place.parent, options)
        for name, write in writers.items():
            with pytest.raises(PipelineError) as caught, disk_errors.writing(place):
                write()
            assert caught.value.what.startswith(f"{place}: cannot be written: {trouble}"), name
            if options == "rw":
                caught.value.__cause__ = None
                gc.collect()
                shutil.rmtree(place)
                place.mkdir()


def test_a_source_that_cannot_be_read_is_not_called_the_target(tmp_path: Path) -> None:
    """Inside the writing of a folder, a file in another folder is named itself."""
    with pytest.raises(PipelineError) as caught, disk_errors.writing(tmp_path / "out" / "weights"):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "images" / "a"))
    assert caught.value.what == (
        f"{tmp_path / 'images' / 'a'}: can be neither read nor written: Permission denied"
    )
    with pytest.raises(PipelineError) as caught, disk_errors.writing(tmp_path / "out" / "weights"):
        raise OSError(errno.EIO, "x", str(tmp_path / "out" / ".weights.new-host-1" / "a"))
    assert caught.value.what.startswith(f"{tmp_path / 'out' / 'weights'}: cannot be written: ")


def test_a_disk_without_names(tmp_path: Path, mount: Mount, monkeypatch) -> None:
    """An error without a path names the disks that are full; one without free files says so."""
    disk = tmp_path / "disk"
    mount(disk, "size=64k,nr_inodes=3")
    monkeypatch.chdir(disk)
    found = disk_errors.explain(OSError(errno.ENOSPC, "No space left on device"))
    assert found is not None
    assert f"are free on the disk of {disk}" in found.what
    write_whole(disk / "a", "")
    write_whole(disk / "b", "")
    with pytest.raises(PipelineError, match="no more files can be made on the disk of"):
        write_whole(disk / "c", "")
    monkeypatch.setenv("TMPDIR", str(disk))
    nowhere = FileNotFoundError(
        errno.ENOENT, f"No usable temporary directory found in ['{disk}', '/tmp']"
    )
    found = disk_errors.explain(nowhere)
    assert found is not None
    assert found.what == f"no temporary file can be written in ['{disk}', '/tmp']"


def test_a_file_is_whole_or_what_it_was(tmp_path: Path) -> None:
    """A block that raises leaves the former bytes and no other file, nor folders made for it."""
    path = tmp_path / "a.txt"
    path.write_text("former")

    def write_half() -> None:
        with replacing(path) as new:
            new.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert contents(tmp_path) == {"a.txt": b"former"}
    write_whole(path, "new")
    with pytest.raises(FileExistsError):
        create(path, "other")
    with pytest.raises(KeyError), replacing(tmp_path / "b" / "c" / "d.txt"):
        raise KeyError
    assert contents(tmp_path) == {"a.txt": b"new"}
    create(tmp_path / "b.txt", "b")
    assert contents(tmp_path) == {"a.txt": b"new", "b.txt": b"b"}


def test_a_new_file_without_hard_links(tmp_path: Path, monkeypatch) -> None:
    """As on some network and USB file systems: it is new all the same."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    create(tmp_path / "a", "a")
    with pytest.raises(FileExistsError):
        create(tmp_path / "a", "b")
    assert contents(tmp_path) == {"a": b"a"}


def test_generated_files_keep_their_former_text(tmp_path: Path, mount: Mount, monkeypatch) -> None:
    """dvc.yaml, a cluster's profile and a configuration by `new`, on a disk without room."""
    disk = tmp_path / "disk"
    mount(disk, "size=64k")
    monkeypatch.setattr(
        pipeline, "pipeline", lambda _: {"stages": {"a": {"cmd": "x" * 9000}}, "plots": []}
    )
    (disk / "dvc.yaml").write_text("stages: {}\n")
    (disk / "config.yaml").write_text("jobs: 3\n")
    fill(disk, 0)
    former = contents(disk)
    with pytest.raises(PipelineError, match=r"dvc\.yaml: cannot be written: No space"):
        pipeline.generate(Path("config/config.yaml"), disk / "dvc.yaml")
    with pytest.raises(PipelineError, match=r"config\.yaml: cannot be written: No space"):
        profile.write_profile(disk, "jobs: 4\n" * 1000)
    assert contents(disk) == former


def test_a_new_configuration(
    inputs: Path, tmp_path: Path, mount: Mount, monkeypatch, capfd
) -> None:
    """`zerotrain new` in a project on such a disk leaves no half of a file under its name."""
    disk = tmp_path / "disk"
    mount(disk, "size=64k")
    monkeypatch.chdir(disk)
    words: list[object] = ["new", "walls", "--images", inputs / "images", "--base", "nano"]
    for options, trouble in (("rw", "No space left on device"), ("ro", "Read-only file system")):
        fill(disk, 0)
        mount(disk, options)
        code = call(words, monkeypatch)
        check_refused(code, capfd.readouterr().err, Path("config"), trouble)
        mount(disk, "rw")
        assert set(contents(disk)) <= {"filler", "config"}


def test_images_of_samples_that_find_no_room(tmp_path: Path, monkeypatch, capsys) -> None:
    """The process that decodes next to a training says it in its log as a command would."""
    from zerotrain.models import families
    from zerotrain.training.reporting import decode_samples

    def full(folder: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / ".step-00000001.png"))

    monkeypatch.setattr(decode_samples, "end_with_parent", lambda: None)
    monkeypatch.setattr(decode_samples.os, "nice", lambda _: None)
    monkeypatch.setattr(families, "load_family", lambda _: SimpleNamespace(modality="image"))
    monkeypatch.setattr(decode_samples, "decode", full)
    with pytest.raises(SystemExit) as ended:
        decode_samples.main([str(tmp_path / "samples"), "--family", "sdxl", "--base", "base"])
    assert ended.value.code == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert said.startswith(f"ERROR: {tmp_path}/samples: cannot be written: No space left on device")
    assert len(said.splitlines()) == 2


def test_standard_output_on_a_full_disk(tmp_path: Path, mount: Mount) -> None:
    """What a command prints into a file that cannot take it: a sentence and code 2, not the 120 of
    Python; and a reader that goes away early is no error."""
    disk = tmp_path / "disk"
    mount(disk, "size=16k")
    fill(disk, 0)
    command = [sys.executable, "-m", "zerotrain", "launch", "explain", "--help"]
    with (disk / "out.txt").open("w") as stream:
        done = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (EXIT_USER_ERROR, 2), done.stderr
    assert "a file cannot be written: No space left on device" in done.stderr


def test_a_log_that_cannot_be_written(tmp_path: Path, mount: Mount, capfd) -> None:
    """The command continues to its end, however much it prints, and one line says where its log
    stops; what is in it stays."""
    disk = tmp_path / "disk"
    mount(disk, "size=64k")
    text = "import sys; [print('x' * 99) for _ in range(3000)]; sys.exit(7)"
    assert supervise([sys.executable, "-c", text], log=disk / "a.log") == 7
    said = capfd.readouterr().err
    sentence = f"{disk / 'a.log'}: its end is missing: No space left on device\n"
    assert said.count(sentence) == 1  # where the disk was full, which may be within a line
    assert said.replace(sentence, "") == ("x" * 99 + "\n") * 3000
    assert (disk / "a.log").read_text().startswith("x" * 99 + "\n")


def publish_empty(folder: Path) -> None:
    """Publish a folder without files."""
    with artifact.publish(folder, "weights"):
        pass


def publish_to_hub(card: Path) -> None:
    """Call `zerotrain publish` with a folder for its card, which it looks at before the weights."""
    publish(PublishOptions(Path("missing"), "me/x", card, license=None, private=True, dry_run=True))


@pytest.mark.parametrize("below", ["", "y", "y/z"])
@pytest.mark.parametrize(
    "write",
    [
        check_writable,
        check_replaceable,
        publish_to_hub,
        publish_empty,
        lambda place: write_whole(place / "y", "text"),
    ],
)
def test_an_output_that_is_a_file(tmp_path: Path, monkeypatch, write, below: str) -> None:
    """Or that is below one, is refused before any work, and the file keeps its bytes."""
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(PipelineError) as caught:
        write(Path("notes.txt", below))
    if (write, below) != (check_replaceable, ""):
        assert caught.value.what == "notes.txt: is a file, not a folder"
    assert caught.value.hint
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"notes.txt": "mine"}


def test_an_output_that_is_a_link_to_nothing(tmp_path: Path) -> None:
    """No folder can be made in its place."""
    (tmp_path / "out").symlink_to("gone")
    with pytest.raises(PipelineError) as caught:
        check_writable(tmp_path / "out" / "y")
    assert caught.value.what == f"{tmp_path / 'out'}: is a link to what is missing, not a folder"
