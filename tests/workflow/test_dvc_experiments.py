"""Experiments of DVC: what runs in a copy of the project, and what is left when one is applied."""

from __future__ import annotations


def test_a_copy_of_the_project_runs_its_own_code(project):
    """Not that of the checkout which the environment was installed from: in the plan, the jobs and
    what they start. DVC runs `dvc exp run --temp` and its queue in such copies."""
    (project.folder / "bin" / "zerotrain").unlink()  # the real command, as the environment has it
    package = project.folder / "workflow" / "zerotrain"
    (package / "stages" / "prepare_dataset.py").write_text("raise SystemExit('edited here')\n")
    done = project.snakemake("--cores", "1", "dataset", PYTHONPATH="")
    assert done.returncode == 1
    assert "edited here" in done.stdout
    assert ", workflow/zerotrain/errors.py" in done.stdout
    assert "/workflow/zerotrain/" not in done.stdout
