"""A preset stays when its dataset is edited, and the stage that reads both says so."""

from __future__ import annotations

from zerotrain import artifact

KEPT = "kept as it is, built for the dataset before the edit"


def test_a_base_that_was_built_for_another_dataset_is_reported(run, family, capsys) -> None:
    """With the command that builds it again; not one of the same dataset, nor of none."""
    run.cache()
    base, dataset = (artifact.read(run.folder / name, name) for name in ("base", "dataset"))
    with artifact.publish(base.folder, "base", parents={"dataset": dataset}) as draft:
        draft.content = base.content
    run.cache()
    assert KEPT not in capsys.readouterr().err
    run.remove(1)
    run.cache()
    said = capsys.readouterr().err
    assert f"{base.folder}: {KEPT}; `snakemake --forcerun build_base`" in said
