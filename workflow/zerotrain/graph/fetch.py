"""fetch: download what jobs need from the internet into a folder that every node sees.

FOLDER/
    hub/        models, in the layout of the hub's own cache: by commit and content
    datasets/   datasets of the hub, prepared
    wheels/     the pinned packages, if requested
    env.sh      sourced by jobs: they find all files there and use no network
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from zerotrain.artifact import write_whole
from zerotrain.artifact.documents import read_text
from zerotrain.config.families import FAMILIES
from zerotrain.config.run import RunConfig
from zerotrain.config.runs import read_runs
from zerotrain.data.text import hub_id
from zerotrain.errors import EXIT_USER_ERROR, PipelineError
from zerotrain.importers import enable_launch_files
from zerotrain.machine import compiled_ops
from zerotrain.machine.disk import size
from zerotrain.machine.disk_errors import explain
from zerotrain.machine.file_lock import one_at_a_time
from zerotrain.machine.regular_file import write_text
from zerotrain.models.base_places import base_files

ENVIRONMENT = "env.sh"
WHEELS = "wheels"
STAMP = "complete"
SET_UP = Path(__file__).parents[3] / "envs" / "setup.py"


def variables(folder: Path) -> dict[str, str]:
    """Return the cache variables of the hub's libraries; HF_HOME, which has the token, stays."""
    folder = folder.resolve()
    return {"HF_HUB_CACHE": str(folder / "hub"), "HF_DATASETS_CACHE": str(folder / "datasets")}


def fetch(configs: list[Path], folder: Path, *, wheels: bool = False) -> Iterator[str]:
    """Download what the configurations need, except for files that are there already.

    Set the environment to `variables(folder)` before the hub's library is imported.

    Args:
        configs: Files of one run, or of several (`runs`).
        folder: The destination.
        wheels: Whether to download the pinned packages as well.

    Yields:
        Sentences for the user, on what is where.

    Raises:
        PipelineError: a configuration or base is invalid, the hub fails, or the disk is full.
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
            hint="name another folder with --to, or make this one usable; what is there stays",
        ) from error
    yield f"jobs source {folder / ENVIRONMENT}: see profiles/slurm/job-environment.sh"


def open_dataset(config: RunConfig) -> None:
    """Open a dataset of the hub, which downloads and prepares missing files.

    Raises:
        PipelineError: the dataset does not exist.
    """
    from zerotrain.data.hub_datasets import load_split

    load_split(config.data)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder for one fetch at a time, and remove incomplete files of a killed one."""
    with one_at_a_time(folder / ".lock") as is_alone:
        if is_alone:
            for path in (folder / "hub").rglob("*.incomplete"):
                path.unlink()
        yield


def _models(runs: Mapping[str, RunConfig], folder: Path) -> Iterator[str]:
    """Download the models' files; look up all before the first download."""
    wanted = []
    missing: dict[tuple[str, str], int] = {}
    for file, run in runs.items():
        if run.is_preset:
            yield f"{file}: base {run.base} is built by the job, nothing to fetch"
            continue
        files = base_files(run.base, run.revision, FAMILIES[run.family])
        if files.single_file is not None:
            yield f"{file}: base {files.single_file} is a file, which every node must see"
        for place, names in files.places:
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
    for file, place, wanted_names, revision in wanted:
        where = place.fetch(wanted_names, revision)
        whole = sum((where / name).stat().st_size for name in wanted_names)
        yield f"{file}: {place.name}: {len(wanted_names)} files, {size(whole)}, in {where}"


def _datasets(runs: Mapping[str, RunConfig]) -> Iterator[str]:
    """Download datasets of the hub, and open each again offline, as a job does."""
    for file, run in runs.items():
        if hub_id(run.data) is None:
            continue
        open_dataset(run)
        again = subprocess.run(
            [sys.executable, "-m", "zerotrain.graph.fetch", file],
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
                hint="save it with save_to_disk of the package datasets, and set data.path, of "
                "images data.images, to that folder",
            )
        yield f"{file}: dataset {run.data.path}, split {run.data.hub_split}"


def _ops(runs: Mapping[str, RunConfig]) -> Iterator[str]:
    """Build DeepSpeed's ops for this machine's processor, if a phase may need them."""
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
    """Download the pinned packages, for a set-up without a network."""
    pinned = read_text(SET_UP.parent / "constraints.txt", follow_links=True)
    stamp = folder / STAMP
    if not stamp.is_file() or read_text(stamp) != pinned:
        folder.mkdir(exist_ok=True)
        if code := subprocess.call([sys.executable, str(SET_UP), "--download", str(folder)]):
            raise PipelineError(
                f"{folder}: the pinned packages were not downloaded (code {code}; see above)",
                hint="fix the cause and run the same command again: whole files stay",
            )
        write_text(stamp, pinned)
    sizes = [path.stat().st_size for path in folder.iterdir() if path.name != STAMP]
    where = shlex.quote(str(folder.resolve()))
    yield (
        f"{len(sizes)} packages, {size(sum(sizes))}; without a network: "
        f"PIP_NO_INDEX=1 PIP_FIND_LINKS={where} make setup"
    )


if __name__ == "__main__":
    enable_launch_files()
    try:
        for each in read_runs(Path(sys.argv[1])).values():
            open_dataset(each)
    except PipelineError as error:
        print(error.what, file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
