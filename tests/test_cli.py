"""The command line: help for every stage, a user's mistake without a traceback, a log."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from tests.builders.commands import run_zerotrain
from tests.builders.settings import write_settings
from typer.testing import CliRunner

from zerotrain import __version__, cli
from zerotrain.config.command_options import folder_of
from zerotrain.config.read import read_config
from zerotrain.errors import EXIT_USER_ERROR

ROOT = Path(__file__).parents[1]
STAGES = sorted(path.stem for path in (ROOT / "workflow/zerotrain/stages").glob("[a-z]*.py"))
COMMANDS: dict[str, Any] = typer.main.get_command(cli.command_line()).commands  # type: ignore[attr-defined]


def test_every_stage_is_a_command() -> None:
    """One stage, one module, one command, one rule: the same noun."""
    assert set(STAGES) <= set(COMMANDS)
    assert {path.stem for path in (ROOT / "rules").glob("*.smk")} >= set(STAGES)
    for stage in STAGES:
        rule = (ROOT / "rules" / f"{stage}.smk").read_text()
        assert f"rule {stage}:" in rule
        assert f" {stage} " in rule.partition("shell:")[2]


@pytest.mark.parametrize(
    ("command", "key"),
    [
        ("cache_latents", "cache.batch_size"),
        ("evaluate", "evaluate.batch_size"),
        ("sample", "--resolution"),
        ("generate", "--max-new-tokens"),
        ("report", "a larger device"),
    ],
)
def test_a_device_out_of_memory_is_a_sentence(
    command: str, key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's figures, no traceback, and what to change; another error stays what it is."""
    said = "CUDA out of memory. Tried to allocate 2.00 GiB."

    def fail(error: RuntimeError) -> None:
        def raise_it() -> None:
            raise error

        monkeypatch.setattr(cli, "command_line", lambda words: raise_it)
        cli.main()

    monkeypatch.setattr(sys, "argv", ["zerotrain", "--log", "a.log", command, "x"])
    with pytest.raises(SystemExit) as caught:
        fail(torch.OutOfMemoryError(f"{said} Of the allocated memory 7 GiB is PyTorch's"))
    assert caught.value.code == EXIT_USER_ERROR
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"ERROR: {command}: the device ran out of memory: {said}"
    assert key in hint
    with pytest.raises(RuntimeError, match="a bug"):
        fail(RuntimeError("a bug"))


@pytest.mark.parametrize(
    "name",
    sorted(
        {
            *COMMANDS,
            "data show",
            "progress accept",
            "dvc generate",
            "launch import",
            "cluster check",
        }
    ),
)
def test_every_command_has_help(name: str) -> None:
    """A sentence for the command and one for each of its options."""
    result = CliRunner().invoke(cli.command_line(), [*name.split(), "--help"])
    assert result.exit_code == 0
    command = COMMANDS[name.split()[0]]
    for word in name.split()[1:]:
        command = command.commands[word]
    assert command.help
    for parameter in command.params:
        assert parameter.help, parameter.name


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_command_is_no_file(text: str) -> None:
    """`launch import --command ''` is answered as a command, not as a file without a name."""
    result = CliRunner().invoke(cli.command_line(), ["launch", "import", "--command", text])
    assert "none of accelerate launch, torchrun, deepspeed and python" in str(result.exception)


@pytest.mark.parametrize("stage", STAGES)
def test_rules_call_commands_with_options_that_exist(stage: str) -> None:
    """Every long flag of a rule's shell command is an option of its stage, and none is missing."""
    shell = (ROOT / "rules" / f"{stage}.smk").read_text().partition("shell:")[2]
    given = set(re.findall(r"--[a-z_]+", shell.partition(f" {stage} ")[2]))
    options = {o for parameter in COMMANDS[stage].params for o in parameter.opts if "--" in o}
    required = {p.opts[0] for p in COMMANDS[stage].params if p.required and "--" in p.opts[0]}
    assert given <= options
    assert required <= given


def test_a_call_builds_only_the_commands_that_it_names() -> None:
    """The list of commands is the same; one of two words, or after an option's value, is built."""
    listed = CliRunner().invoke(cli.command_line(["--help"]), ["--help"], prog_name="zerotrain")
    assert (
        listed.stdout
        == CliRunner().invoke(cli.command_line(), ["--help"], prog_name="zerotrain").stdout
    )
    words = ["--log", "sample", "cache", "prune", "--dry-run"]
    made: Any = typer.main.get_command(cli.command_line(words))
    assert made.commands["sample"].params
    assert "prune" in made.commands["cache"].commands
    assert [one.name for one in made.commands["generate"].params] == []


def test_help_groups_commands_by_what_they_are_for(
    generated: Callable[[Path, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a person starts with comes first, what rules call last; each command is in one group."""
    monkeypatch.setenv("COLUMNS", "100")
    text = CliRunner().invoke(cli.command_line(), ["--help"], prog_name="zerotrain").stdout
    generated(
        ROOT / "tests/golden/cli/help.txt",
        "".join(f"{line.rstrip()}\n" for line in text.splitlines()),
    )
    titles = [line.split("─ ")[1].split(" ─")[0] for line in text.splitlines() if "╭─ " in line]
    assert titles[1:] == [*cli.PANELS]
    assert titles[-1] == "Called by rules and set-up"
    assert sorted(COMMANDS) == sorted(
        entry.info.name if isinstance(entry, typer.Typer) else entry.__name__
        for entries in cli.PANELS.values()
        for entry in entries
    )


def test_version_names_the_release_and_the_commit() -> None:
    """What a report of a problem needs."""
    done = run_zerotrain("--version", folder=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(
        rf"zerotrain {re.escape(__version__)} \(commit [0-9a-f]{{40}}(-dirty)?\)\n", done.stdout
    )


def test_a_mistyped_command_is_answered_with_the_nearest(tmp_path: Path) -> None:
    """And a mistyped option."""
    assert "Did you mean 'sample'?" in run_zerotrain("smaple", folder=tmp_path).stderr
    assert (
        "--resolution"
        in run_zerotrain("sample", "a", "b", "--resolutoin", "8", folder=tmp_path).stderr
    )


def test_a_users_mistake_has_no_traceback(tmp_path: Path) -> None:
    """One ERROR, one Hint, exit code 2."""
    result = run_zerotrain(
        "prepare_dataset", "--settings", "nowhere.json", "--output", "data", folder=tmp_path
    )
    assert result.returncode == EXIT_USER_ERROR == 2
    assert result.stdout == ""
    assert result.stderr.startswith(
        "ERROR: nowhere.json: no such file with settings of prepare_dataset\n  Hint: "
    )
    assert "Traceback" not in result.stderr


def test_a_missing_folder_is_a_users_mistake(tmp_path: Path) -> None:
    """And nothing is made on the way to it."""
    run = read_config(ROOT / "config" / "config.yaml")
    file = write_settings(tmp_path / "settings.json", "render_launch", run, "plain")
    words = ["--settings", file, "--dataset", "gone", "--preset", "x"]
    result = run_zerotrain("render_launch", *words, "--output", "launch", folder=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("ERROR: gone: no manifest.json")
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["--log {}", "--log={}", "--log ./{}"])
def test_log_is_a_copy_of_the_output(tmp_path: Path, form: str) -> None:
    """--log before the stage: the same output, the same exit code, and a file."""
    words = form.format("logs/new.log").split()
    stage = ["new", "a b", "--images", ".", "--base", "nano"]
    for _ in range(2):
        result = run_zerotrain(*words, *stage, folder=tmp_path)
        assert result.returncode == 2
        assert "'a b' cannot name a run" in result.stderr
    assert (tmp_path / "logs" / "new.log").read_text() == 2 * result.stderr


def test_a_manifest_names_its_folder() -> None:
    """Rules name manifest.json, people name folders."""
    assert folder_of("results/a/weights/manifest.json") == Path("results/a/weights")
    assert folder_of("results/a/weights") == Path("results/a/weights")


@pytest.mark.parametrize("name", ["", ".", "digits"])
def test_accept_takes_run_and_phase(tmp_path: Path, monkeypatch, name: str) -> None:
    """With or without results/ in front; fewer words name no phase."""
    monkeypatch.chdir(tmp_path)

    def said(name: str) -> str:
        return str(CliRunner().invoke(cli.command_line(), ["progress", "accept", name]).exception)

    for phase in ("digits/plain", "results/digits/plain", "./results/digits/plain/"):
        assert "ERROR: results/digits/plain: no progress was set aside" in said(phase)
    assert said(name).startswith(f"ERROR: {name!r} names no phase\n  Hint: ")


@pytest.mark.parametrize(("own", "used"), [(None, "PASSIVE 3000"), ("ACTIVE", "ACTIVE None")])
def test_threads_of_torch_spin_for_a_moment(own: str | None, used: str) -> None:
    """In every process that imports the package, from before torch is imported; a user's own value
    is kept."""
    code = (
        "import os, sys\n"
        "class Look:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'torch': seen.append(waiting())\n"
        "def waiting(): return [os.environ.get(name) for name in NAMES]\n"
        "seen = []; sys.meta_path.insert(0, Look())\n"
        "import zerotrain; import torch\n"
        "print(*seen[0]); print(*waiting())"
    )
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    code = code.replace("NAMES", repr(names))
    variables = {k: v for k, v in os.environ.items() if k not in names}
    variables |= {"OMP_WAIT_POLICY": own} if own else {}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [used, used], done.stderr


def test_help_needs_no_torch() -> None:
    """A command that a person looks up answers at once."""
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from zerotrain import cli\n"
        "for words in ([], ['train_phase']):\n"
        "    assert CliRunner().invoke(cli.command_line(), [*words, '--help']).exit_code == 0\n"
        "print([name for name in ('torch', 'numpy', 'psutil') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


@pytest.mark.parametrize("text", [None, "run: [", "", "- run", "a folder"])
def test_check_refuses_a_file_in_a_sentence(tmp_path: Path, text: str | None) -> None:
    """`make train CONFIG=` asks it first: Snakemake would answer these with a traceback."""
    path = tmp_path if text == "a folder" else tmp_path / "mine.yaml"
    if path != tmp_path and text is not None:
        path.write_text(text)
    done = run_zerotrain("check", path)
    assert done.returncode == 2
    why = "cannot be read: is a folder, not a file\n  Hint: " if path == tmp_path else ""
    assert done.stderr.startswith(f"ERROR: {path}: {why}")
    assert "Hint: " in done.stderr
    assert "Traceback" not in done.stderr


CHECKED = "valid: keys and values, and the base, the data and the launches that they name\n"


def test_check_says_what_it_has_checked(tmp_path: Path) -> None:
    """In one line, also of several runs."""
    done = run_zerotrain("check", "config/config.yaml")
    said = f"config/config.yaml: run digits is {CHECKED}"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
    several = tmp_path / "several.yaml"
    several.write_text("runs: [config/config.yaml, config/sums.yaml]\n")
    done = run_zerotrain("check", several)
    said = f"{several}: 2 runs are {CHECKED}"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_check_says_what_results_depend_on(tmp_path: Path) -> None:
    """A base of links is as good as the files that it leads to."""
    path = tmp_path / "mine.yaml"
    for copy, said in (
        ("link", "base: results/mine/base links to files of someone/sdxl, which has to stay; "
                 "weights/ hold copies. `base_copy: copy` makes the base independent\n"),
        ("copy", ""),
    ):  # fmt: skip
        path.write_text(
            "{run: mine, base: someone/sdxl, data: {source: digits}, phases: [{name: a, until: 1}],"
            f" base_copy: {copy}}}"
        )
        found = CliRunner().invoke(cli.command_line(), ["check", str(path)])
        assert (found.exit_code, found.output) == (0, f"{said}{path}: run mine is {CHECKED}")


@pytest.mark.parametrize("config", ["typo.yaml", ""])
def test_make_train_checks_the_file_before_snakemake_opens_it(config: str) -> None:
    """The example needs no check beforehand: the Snakefile reads it first."""
    words = ["make", "-n", "train", f"CONFIG={config}"]
    recipe = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    before, _, after = recipe.partition("snakemake --cores all train")
    assert (f"zerotrain check '{config}'\n" in before) == bool(config)
    assert (f"--configfile '{config}'" in after) == bool(config)
