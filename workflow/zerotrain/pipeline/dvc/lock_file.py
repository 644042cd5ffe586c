"""Commits of stages to dvc.lock: their current inputs, and their outputs, which DVC stores.

This is `dvc commit --force --no-relink` for several stages at once. The command reads and writes
all of dvc.lock for each given stage, which took 9 s for the twelve stages of the example.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from zerotrain.artifact import MANIFEST
from zerotrain.errors import PipelineError
from zerotrain.pipeline.dvc.storage import open_repo


def commit_stages(names: Iterable[str]) -> None:
    """Commit these stages of dvc.yaml.

    Raises:
        PipelineError: DVC is running here or cannot store an output, or files of an output are
            missing or damaged; the other stages are committed.
    """
    from dvc.exceptions import DvcException

    wanted, entered, failed = set(names), [], []
    with open_repo() as repo, repo.lock:
        stages = [stage for stage in repo.stage.load_all("dvc.yaml") if stage.name in wanted]
        for stage in stages:
            for out in stage.outs:
                if out.persist:  # a progress folder that was deleted to free disk space
                    Path(out.fs_path).mkdir(parents=True, exist_ok=True)
            former = {out: (out.hash_info, out.get_obj()) for out in stage.outs if out.hash_info}
            try:
                stage.save()
                if damaged := [str(out) for out in former if _is_damaged(out, *former[out])]:
                    failed.append(
                        f"{stage.name}: {', '.join(damaged)}: other files under the manifest that "
                        f"was stored; `dvc checkout --force {damaged[0]}` brings them back"
                    )
                    continue
                stage.commit(relink=False)
            except DvcException as error:
                failed.append(f"{stage.name}: {error}")
                continue
            entered.append(stage)
        if entered:
            entered[0].dvcfile.dump_stages(entered, update_pipeline=False)
    if failed:
        raise PipelineError(
            "not entered in dvc.lock: " + "\n  ".join(failed),
            hint="fix that, and call `snakemake` again",
        )


def _is_damaged(out: Any, hash_info: Any, tree: Any) -> bool:
    """Return whether files of a folder are missing or changed while its manifest is as stored."""
    if tree is None or out.hash_info == hash_info or not (out.hash_info.isdir and hash_info.isdir):
        return False
    before, now = (dict(_hashes(one)) for one in (tree, out.get_obj()))
    manifest = (MANIFEST,)
    if manifest not in before or before[manifest] != now.get(manifest):
        return False
    return any(now.get(key) != value for key, value in before.items())


def _hashes(tree: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, _, found in tree:
        yield key, found.value
