"""Start, stop and switch of a run from the page: the commands of a shell, in sessions of their own.

A training belongs to no server: it runs on when the page is closed, its output is in a file of the
run, and what runs is read from files, so a server that is started later shows and stops it, too.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from zerotrain.artifact import write_whole
from zerotrain.artifact.documents import read_record
from zerotrain.artifact.layout import RunFolder
from zerotrain.artifact.links import check_run_links
from zerotrain.config.read import read_config
from zerotrain.config.runs import config_option, find_config
from zerotrain.errors import PipelineError
from zerotrain.graph.switch.command import is_switching
from zerotrain.graph.switch.plan import check_preset
from zerotrain.machine.child_process import SUPERVISOR
from zerotrain.machine.disk_errors import writing
from zerotrain.machine.output import LOG
from zerotrain.machine.processes import ProcessRecord, record_of
from zerotrain.machine.regular_file import open_new, open_to_read, touch
from zerotrain.run.processes import find_processes
from zerotrain.run.runs import phase_folders
from zerotrain.run.view import RunView
from zerotrain.training.checkpointing.progress_folder import STOP

What = Literal["train", "switch"]
PRECISIONS = ("no", "bf16", "fp16")
PLAN_SECONDS = 300.0
"""How long a dry run of a switch may take; it plans the graph."""
MOST_PROCESSES = 4096
COMMANDS = (("snakemake", "--cores"), ("zerotrain", "switch"))
"""What a page starts, by its first words."""
OWN_VARIABLES = (SUPERVISOR, LOG)
"""Set by a command that has started this server; a child that has them would belong to it."""
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
MESSAGE = re.compile(r"^ERROR: (.*?)\n  Hint: (.*)", re.DOTALL | re.MULTILINE)
_starting = threading.Lock()


@dataclass(frozen=True)
class StartedCommand:
    """A command that a page has started, as its record in the run's folder has it.

    Runs are exchanged, so a record may name any process.
    """

    process: ProcessRecord
    words: tuple[str, ...]
    """As a person would type them."""

    @property
    def is_alive(self) -> bool:
        """Whether it runs: a command of this user that a page starts, in this project."""
        return self.words[:2] in COMMANDS and self.process.runs_command(self.words)


@dataclass(frozen=True)
class SwitchChoice:
    """What a run is switched to; None: as before."""

    preset: str | None = None
    num_processes: int | None = None
    mixed_precision: str | None = None

    def words(self) -> list[str]:
        """Return the options of `zerotrain switch`.

        Raises:
            PipelineError: nothing is chosen, or a value does not exist.
        """
        words: list[str] = []
        if self.preset is not None:
            check_preset(self.preset)
            words += ["--to", self.preset]
        if self.num_processes is not None:
            if not 1 <= self.num_processes <= MOST_PROCESSES:
                raise PipelineError(
                    f"{self.num_processes} processes", hint=f"give 1 to {MOST_PROCESSES}"
                )
            words += ["--num-processes", str(self.num_processes)]
        if self.mixed_precision is not None:
            if self.mixed_precision not in PRECISIONS:
                raise PipelineError(
                    f"{self.mixed_precision!r} is no precision", hint=", ".join(PRECISIONS)
                )
            words += ["--mixed-precision", self.mixed_precision]
        if not words:
            raise PipelineError(
                "nothing to switch is chosen", hint="choose a preset, a precision or a number"
            )
        return words


def start(run: str) -> StartedCommand:
    """Start the training of a run, as `snakemake --cores all train --configfile FILE` does.

    Raises:
        PipelineError: it runs already, another Snakemake works in this project, or no
            configuration has the run.
    """
    file = _checked_config(run)
    with _starting:
        _check_idle(run)
        words = ["snakemake", "--cores", "all", "train", *config_option(file)]
        child, started = _spawn(run, "train", words)
    threading.Thread(target=child.wait, daemon=True).start()
    return started


def stop(run: str) -> str:
    """Ask a run to stop, as the file progress/stop and Ctrl-C do.

    Returns:
        What was asked, as a sentence.

    Raises:
        PipelineError: nothing of the run runs on this machine, or a link is in its folder.
    """
    check_run_links(run)
    for phase in RunView(run, folders=phase_folders(run)).phases:
        if (trainer := phase.trainer) is not None:
            with writing(phase.places.progress):
                touch(phase.places.progress / STOP)
            return (
                f"{phase.name}: pid {trainer.pid} on {trainer.host} was asked to stop "
                "after its step, with a checkpoint."
            )
    switching = read_started(run, "switch")
    pids = [switching.process.pid] if switching and switching.is_alive else _snakemakes_of(run)
    if not pids:
        raise PipelineError(
            f"{run}: nothing of it runs on this machine",
            hint="stop a run of another machine there, or by its job",
        )
    for pid in pids:
        _interrupt(pid)
    return f"pid {', '.join(map(str, pids))} was interrupted, as by Ctrl-C; finished stages stay."


def is_asked_to_stop(run: str) -> bool:
    """Return whether a training of the run has been asked to stop and is still at work."""
    phases = RunView(run, folders=phase_folders(run)).phases
    return any((one.places.progress / STOP).exists() and one.trainer for one in phases)


def plan_switch(run: str, choice: SwitchChoice) -> str:
    """Return what `zerotrain switch --dry-run` says: the diff of the configuration, and the jobs.

    Raises:
        PipelineError: the switch is refused; with its own message.
    """
    words = _switch_words(run, choice)
    try:
        done = subprocess.run(
            [*_program(words), "--dry-run"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=_environment(),
            timeout=PLAN_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise PipelineError(
            f"{shlex.join(words)} --dry-run takes longer than {PLAN_SECONDS:g} s",
            hint="call it in a terminal",
        ) from error
    if done.returncode:
        raise _error_of(done.stderr, words, done.returncode)
    return COLOURS.sub("", done.stdout)


def switch(run: str, choice: SwitchChoice, *, then_start: bool) -> StartedCommand:
    """Start `zerotrain switch`: it ends the phase at a checkpoint and edits the configuration.

    Args:
        run: The run's name.
        choice: What to switch to.
        then_start: Whether the training is started again once the switch has succeeded, if this
            server then still runs.

    Raises:
        PipelineError: the choice is invalid, or another switch of the run is in progress.
    """
    words = _switch_words(run, choice)
    _checked_config(run)
    with _starting:
        _check_no_switch(run)
        child, started = _spawn(run, "switch", words)

    def follow() -> None:
        if child.wait() == 0 and then_start:
            with suppress(PipelineError):  # the page shows that it does not run
                start(run)

    threading.Thread(target=follow, daemon=True).start()
    return started


def read_started(run: str, what: What) -> StartedCommand | None:
    """Return the command that a page has started last; None if none has, or its record is torn."""
    try:
        return read_record(_place(run, what).with_suffix(".json"), StartedCommand)
    except (OSError, ValueError):
        return None


def read_output(run: str, what: What, lines: int) -> list[str]:
    """Return the last lines of a started command's output, without colours."""
    try:
        with open_to_read(_place(run, what)) as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 64 * 1024))
            text = stream.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rpartition("\r")[2] for line in COLOURS.sub("", text).splitlines()][-lines:]


def is_at_work(run: str) -> bool:
    """Return whether a page's command of the run is alive, which may have recorded nothing yet."""
    return any(
        one is not None and one.is_alive
        for one in (read_started(run, "train"), read_started(run, "switch"))
    )


def _place(run: str, what: What) -> Path:
    return RunFolder(run).path / "logs" / f"builder.{what}.log"


def _check_idle(run: str) -> None:
    """Check that no Snakemake works in this project: it locks the folder."""
    _check_no_switch(run)
    started = read_started(run, "train")
    living = [one.pid for one in find_processes().snakemakes]
    if started is not None and started.is_alive:
        living.append(started.process.pid)
    if living:
        raise PipelineError(
            f"snakemake works in this project already, as pid {living[0]}",
            hint="wait until it has ended, or stop it; one at a time can work in a folder",
        )


def _check_no_switch(run: str) -> None:
    started = read_started(run, "switch")
    if is_switching(run) or (started is not None and started.is_alive):
        raise PipelineError(
            f"{run}: is being switched", hint="wait until the switch has ended; the page shows it"
        )


def _checked_config(run: str) -> Path:
    """Return a run's configuration, after a look at it and at the folders that jobs write to."""
    file = find_config(run)
    check_run_links(run, data=read_config(file).data_name)
    return file


def _switch_words(run: str, choice: SwitchChoice) -> list[str]:
    return ["zerotrain", "switch", str(find_config(run)), *choice.words()]


def _spawn(
    run: str, what: What, words: Sequence[str]
) -> tuple[subprocess.Popen[bytes], StartedCommand]:
    """Start a command in a session of its own, with its output in a file, and record it."""
    log = _place(run, what)
    with writing(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        with open_new(log) as output:
            output.write(f"$ {shlex.join(words)}\n".encode())
            output.flush()
            child = subprocess.Popen(
                _program(words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(),
                start_new_session=True,
            )
        started = StartedCommand(record_of(child.pid), tuple(words))
        write_whole(log.with_suffix(".json"), json.dumps(asdict(started)))
    return child, started


def _program(words: Sequence[str]) -> list[str]:
    """Return the command with this Python, which has the packages, whatever PATH says."""
    return [sys.executable, "-m", *words]


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}


def _snakemakes_of(run: str) -> list[int]:
    """Return the pids of this machine's Snakemakes that plan a run."""
    started = read_started(run, "train")
    if started is not None and started.is_alive:
        return [started.process.pid]
    return [one.pid for one in find_processes().snakemakes if one.runs and run in one.runs]


def _interrupt(pid: int) -> None:
    """Send SIGINT to the group of a command, as a terminal does; never to our own group."""
    with suppress(ProcessLookupError):
        group = os.getpgid(pid)
        if group == os.getpgid(0):
            os.kill(pid, signal.SIGINT)
        else:
            os.killpg(group, signal.SIGINT)


def _error_of(output: str, words: Sequence[str], code: int) -> PipelineError:
    """Return a command's own message as an error."""
    if found := MESSAGE.search(COLOURS.sub("", output)):
        return PipelineError(found[1], hint=found[2].strip())
    last = (output.strip().splitlines() or ["no output"])[-1]
    return PipelineError(
        f"{shlex.join(words)} ended with code {code}: {last}", hint="call it in a terminal"
    )
