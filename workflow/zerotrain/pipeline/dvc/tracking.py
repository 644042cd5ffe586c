"""`zerotrain data add`: track a user's dataset with DVC."""

from __future__ import annotations

import shlex
from pathlib import Path

from zerotrain.errors import PipelineError
from zerotrain.pipeline.dvc.commits import git
from zerotrain.pipeline.dvc.storage import open_repo


def add(data: Path) -> list[str]:
    """Track a dataset, or update it if it is tracked already.

    Args:
        data: A folder of images or a text file, inside the project.

    Returns:
        The lines to print: what was written, what to add to git, and how a configuration names the
        data.

    Raises:
        PipelineError: the data is missing or outside, or belongs to git, a stage or another
            dataset.
    """
    with open_repo() as repo:
        place = _place(data, Path(repo.cache.local.path).resolve())
        for out in repo.index.outs:
            if not out.is_in_repo:
                continue
            of = Path(out.fs_path).relative_to(repo.root_dir)
            if of == place and out.stage.is_data_source:
                if not out.use_cache:
                    raise PipelineError(
                        f"{place}: tracked already, by {place}.dvc and by git itself",
                        hint="nothing is to be done: it comes with every clone",
                    )
                if not out.status():
                    return [f"{place}: tracked by {place}.dvc already, and unchanged"]
            elif of == place or of in place.parents or place in of.parents:
                owner = out.stage.addressing
                kind = "tracked by" if out.stage.is_data_source else "made by the stage"
                raise PipelineError(
                    f"{place}: {of} is {kind} {owner} already",
                    hint="name a folder of your own that is neither in it nor contains it",
                )
        if held := git("ls-files", "--", str(place)).splitlines():
            raise PipelineError(
                f"{place}: {len(held)} files of it are tracked by git, {held[0]} among them",
                hint="let git forget them (they stay here): "
                f"`git rm -r --cached {_word(place)}`, then call it again",
            )
        renewed = Path(f"{place}.dvc").exists()
        repo.add([str(place)])
    ignored = place.with_name(".gitignore")
    key = "path" if place.is_file() else "images"
    return [
        f"{'renewed' if renewed else 'wrote'} {place}.dvc",
        f"then: git add {_word(f'{place}.dvc')} {_word(ignored)}",
        "      dvc push    (once a remote is set: `dvc remote add --default NAME URL`)",
        f"config: data.{key}: {place}",
    ]


def _place(data: Path, cache: Path) -> Path:
    """Return the path relative to the project."""
    if not data.exists():
        raise PipelineError(f"{data}: no such folder", hint="name one that exists")
    root, found = Path.cwd().resolve(), data.resolve()
    if found == root or not found.is_relative_to(root):
        raise PipelineError(
            f"{data}: not a folder inside the project {root}, and DVC tracks nothing outside",
            hint=f"copy it: `cp -r {_word(data)} data/`, then `zerotrain data add "
            f"{_word(Path('data', found.name))}`",
        )
    files = [data, *data.rglob("*")]
    # DVC's own links point into its cache; it would replace other links by files.
    for link in (path for path in files if path.is_symlink()):
        if cache not in link.resolve().parents:
            raise PipelineError(
                f"{link}: a link to {link.resolve()}, and DVC would put a file in its place",
                hint=f"copy the files themselves: `cp -rL {_word(data)} {_word(f'{data}-files')}`, "
                "and add that",
            )
    if not any(path.is_file() for path in files):
        raise PipelineError(f"{data}: an empty folder", hint="put the images or texts into it")
    return found.relative_to(root)


def _word(path: Path | str) -> str:
    """Quote a path for the shell."""
    return shlex.quote(str(path))
