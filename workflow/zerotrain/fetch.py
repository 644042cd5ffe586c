"""fetch: what jobs would take from the internet, put into a folder that every node sees.

FOLDER/
    hub/        models, as the hub's own cache keeps them: by commit and content
    datasets/   datasets of text, prepared
    wheels/     the pinned packages, where asked for
    env.sh      what a job sources: all of it is found there, and nothing asked of a network
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from zerotrain import compiled_ops
from zerotrain.artifact import write_whole
from zerotrain.base_places import base_files
from zerotrain.config import RunConfig
from zerotrain.config.runs import read_runs
from zerotrain.data.text import hub_id
from zerotrain.disk_errors import explain
from zerotrain.errors import EXIT_USER_ERROR, PipelineError
from zerotrain.families import load_family
from zerotrain.machine.disk import size

ENVIRONMENT = "env.sh"
WHEELS = "wheels"
STAMP = "complete"
SET_UP = Path(__file__).parents[2] / "envs" / "setup.py"


def variables(folder: Path) -> dict[str, str]:
    """Where the hub's libraries keep files; HF_HOME stays, since the login's token lies there."""
    folder = folder.resolve()
    return {"HF_HUB_CACHE": str(folder / "hub"), "HF_DATASETS_CACHE": str(folder / "datasets")}


def fetch(configs: list[Path], folder: Path, *, wheels: bool = False) -> Iterator[str]:
    """Download what the configurations need; what is there already is not downloaded again.

    The environment has to hold `variables(folder)` before the hub's library is imported.

    Args:
        configs: Files of one run, or of several (`runs`).
        folder: Where it is put.
        wheels: Whether the pinned packages are wanted as well.

    Yields:
        Sentences for the user: what lies where.

    Raises:
        PipelineError: a configuration or base is wrong, the hub gives nothing, or the disk is full.
    """
    runs = {file: run for path in configs for file, run in read_runs(path).items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            yield from _models(runs, folder)
            yield from _datasets(runs)
            yield from _ops(runs)
            if wheels:
                yield from _wheels(folder / WHEELS)
            exports = {**variables(folder), "HF_HUB_OFFLINE": "1"}
            lines = [f"export {name}={shlex.quote(value)}\n" for name, value in exports.items()]
            write_whole(folder / ENVIRONMENT, "".join(lines))
    except OSError as error:
        if found := explain(error, folder):
            raise found from error
        raise PipelineError(
            f"{error.filename or folder}: {error.strerror or error}",
            hint="mend the folder or name another one with --to; what is there already stays",
        ) from error
    yield f"jobs source {folder / ENVIRONMENT}: see profiles/slurm/job-environment.sh"


def open_dataset(config: RunConfig) -> None:
    """Open a dataset of the hub, which downloads and prepares what is missing.

    Raises:
        PipelineError: there is none.
    """
    from zerotrain.data.hub_text import hub_rows

    next(hub_rows(config.data)[0], None)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One fetch at a time; the kernel frees a killed one's lock, and what it had begun goes."""
    with (folder / ".lock").open("a") as lock:
        with contextlib.suppress(OSError):  # a file system without this lock: others may download
            fcntl.flock(lock, fcntl.LOCK_EX)
            for path in (folder / "hub").rglob("*.incomplete"):
                path.unlink()
        yield


def _models(runs: Mapping[str, RunConfig], folder: Path) -> Iterator[str]:
    """The models' files, looked up before the first is downloaded."""
    wanted = []
    missing: dict[tuple[str, str], int] = {}
    for file, run in runs.items():
        if run.is_preset:
            yield f"{file}: base {run.base} is built by the job, nothing to fetch"
            continue
        for place, names in base_files(run, load_family(run.family)).places:
            if place.repo is None:
                yield f"{file}: base {place.name} is a folder, which every node must see"
                continue
            revision = run.revision or "main"
            absent = place.missing(names.values(), revision)
            missing |= {(place.name, name): count for name, count in absent.items()}
            wanted.append((file, place, [*names.values()], revision))
    free, needed = shutil.disk_usage(folder).free, sum(missing.values())
    if needed > free:
        raise PipelineError(
            f"{folder}: {size(free)} are free, the models that are missing take {size(needed)}",
            hint="free some, or name a folder on a larger disk with --to",
        )
    for file, place, files, revision in wanted:
        where = place.fetch(files, revision)
        whole = sum((where / name).stat().st_size for name in files)
        yield f"{file}: {place.name}: {len(files)} files, {size(whole)}, in {where}"


def _datasets(runs: Mapping[str, RunConfig]) -> Iterator[str]:
    """Datasets of the hub, each opened once more as a job will: without a network."""
    for file, run in runs.items():
        if hub_id(run.data) is None:
            continue
        open_dataset(run)
        again = subprocess.run(
            [sys.executable, "-m", "zerotrain.fetch", file],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if again.returncode:
            raise PipelineError(
                f"data.path: {run.data.path} was downloaded, but cannot be opened without the hub: "
                f"{(again.stderr.strip().splitlines() or ['no word'])[0]}",
                hint="save it with save_to_disk of the package datasets, and set data.path to that "
                "folder",
            )
        yield f"{file}: dataset {run.data.path}, split {run.data.hub_split}"


def _ops(runs: Mapping[str, RunConfig]) -> Iterator[str]:
    """DeepSpeed's ops for this machine's processor, where a phase may need them."""
    launches = [phase.launch for run in runs.values() for phase in run.phases]
    if all(launch.preset == "torch" for launch in launches):
        return
    compiled_ops.build()
    if any(launch.offload_path for launch in launches):
        compiled_ops.build_swap_op()
    yield (
        f"DeepSpeed's ops for this processor: {compiled_ops.ops_folder()}; a node with another one "
        "builds its own there at its first training, for which it needs a C++ compiler"
    )


def _wheels(folder: Path) -> Iterator[str]:
    """The pinned packages, for a set-up without a network."""
    pinned = (SET_UP.parent / "constraints.txt").read_text()
    stamp = folder / STAMP
    if not stamp.is_file() or stamp.read_text() != pinned:
        folder.mkdir(exist_ok=True)
        if code := subprocess.call([sys.executable, str(SET_UP), "--download", str(folder)]):
            raise PipelineError(
                f"{folder}: the pinned packages were not downloaded (code {code}; see above)",
                hint="mend the cause and run the same command again: whole files stay",
            )
        stamp.write_text(pinned)
    sizes = [path.stat().st_size for path in folder.iterdir() if path.name != STAMP]
    where = shlex.quote(str(folder.resolve()))
    yield (
        f"{len(sizes)} packages, {size(sum(sizes))}; without a network: "
        f"PIP_NO_INDEX=1 PIP_FIND_LINKS={where} make setup"
    )


if __name__ == "__main__":
    try:
        for each in read_runs(Path(sys.argv[1])).values():
            open_dataset(each)
    except PipelineError as error:
        print(error.what, file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
