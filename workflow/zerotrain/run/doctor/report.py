"""The report: facts as nested keys, problems as sentences, as plain text or JSON.

And what it says of a run: its configuration, the launch of the last trained phase, and its end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from zerotrain import artifact
from zerotrain.artifact.documents import DocumentError, read_text
from zerotrain.artifact.layout import RunFolder
from zerotrain.config.read import read_config
from zerotrain.config.runs import find_config
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine import disk
from zerotrain.machine.detect import Machine
from zerotrain.machine.host import gib
from zerotrain.run.lineage.chain import facts_of
from zerotrain.run.phase import PhaseView
from zerotrain.run.watch.state import describe_fault
from zerotrain.state.ran_on import RanOn
from zerotrain.training.checkpointing import progress_folder
from zerotrain.training.process import machine_check, nvme_check, swap_folder

HIDDEN = "***"
NAMES = (
    r"(?:api[_-]?key|access[_-]?key|(?:private|wandb|encryption|account)[_-]?key|secret(?:[_-]?key)?"
    r"|token|passw(?:or)?d|passphrase|_pass|credentials?|authorization|connection_string|webhook_url)"
)
"""Parts of the names of values that are secret, as in HF_TOKEN and aws_secret_access_key."""
NO_SECRET = r"(?:eos|bos|pad|unk|sep|cls|mask|trigger|instance)_token"
"""Names of words that a model knows."""
SECRETS = (
    # Keys with a prefix: Hugging Face, OpenAI, Anthropic, GitHub, GitLab, Slack, AWS, Google, npm,
    # PyPI, W&B, Replicate, DigitalOcean.
    r"\b(?:hf_|api_org_|gh[opsur]_|github_pat_|wandb_v1_|r8_|do[opr]_v1_)[\w-]{8,}",
    r"\bgl(?:pat|dt|rt|cbt|ptt|ft|soat|agent|imt|wt)-[\w-]{8,}",
    r"\bsk-(?=[\w-]*\d)[\w-]{20,}|\bxox[abeprs]-(?=[\w-]*\d)[\w-]{10,}",
    r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}|\bAIza[\w-]{20,}|\b(?:npm_|pypi-)[\w-]{16,}",
    # Webhooks of Discord and Slack, which trainers notify; Stripe, SendGrid, Telegram.
    r"(?<=/webhooks/)\d+/[\w-]+|(?<=hooks\.slack\.com/services/)[\w/]+",
    r"\b[rs]k_(?:live|test)_\w{8,}|\bSG\.[\w-]{16,}\.[\w-]{16,}|\b\d{6,}:[\w-]{30,}",
    r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*",  # a JSON Web Token
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    # W&B's former keys; commits have as many digits.
    r"(?<!revision[:=])(?<!revision: )(?<!revision: ['\"])(?<!revision\": \")(?<!commit )"
    r"(?<!snapshots/)\b[0-9a-fA-F]{40}\b",
    r"(?<=://)[^/\s@]+(?=@)",  # user, password or token in a URL
    r"(?i:(?<=[?&])(?:sig|signature|x-amz-[a-z-]+|x-goog-[a-z-]+|se|sv|key)=[^&\s\"']+)",
    r"(?i:(?<=authorization: )(?:bearer|basic)\s+[^\s\"']+)",
    r"(?i:\b(?:bearer|basic)\s+(?=[\w~+/=-]*[.\d_~+/=]\w)[\w.~+/=-]{8,})",
)
"""Forms of keys, as the well-known scanners look for them.

A list of our own: detect-secrets 1.5.0, the maintained library, finds keys only in their exact form
and knows neither Hugging Face's, Anthropic's and W&B's keys nor `Bearer`, `TOKEN@host` and `sig=`.
A text that is to be pasted rather loses a word too many.
"""
_SECRET = re.compile("|".join(SECRETS))
_NAMED = re.compile(
    rf"""(?ix)\b (?!(?:[\w.-]*[.-])?{NO_SECRET}\b) ([\w.-]*{NAMES}(?:_?\d+)? ["']? \s*[:=]\s*)
    (?:"[^"\n]+" | '[^'\n]+' | [^\s"',;)\]}}}}]+)"""
)
_OPTION = re.compile(rf"(?i)(?<!\S)(--(?!{NO_SECRET})[\w-]*{NAMES}\s+)[^\s-]\S*")
_SECRET_NAME = re.compile(rf"(?i)^(?!(?:.*[.-])?{NO_SECRET}$).*{NAMES}(?:_?\d+)?$")


@dataclass
class Report:
    """Facts and problems. Keys that end in _bytes hold bytes; text shows them in GiB or MiB."""

    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Sentences; without any, a training would start."""

    def text(self) -> str:
        """Format as plain text, without the home folder and without secrets."""
        count = len(self.problems)
        verdict = f"{count} problem{'s' if count > 1 else ''}" if count else "no problem found"
        lines = [f"zerotrain doctor: {verdict}", *(f"  - {problem}" for problem in self.problems)]
        return redact("\n".join([*lines, *_lines(_without_secrets(self.facts), "")])) + "\n"

    def json(self) -> str:
        """Format as one JSON object: `problems`, and the facts by section."""
        found = _without_secrets({"problems": self.problems, **self.facts})
        return json.dumps(found, indent=1) + "\n"


def redact(text: str) -> str:
    """Remove the user's home folder and likely secrets from a text."""
    for home in {str(Path.home()), str(Path.home().resolve())} - {"/"}:
        text = re.sub(rf"{re.escape(home)}(?=[/\s\"':,;)]|$)", "~", text)
    for named in (_OPTION, _NAMED):
        text = named.sub(rf"\1{HIDDEN}", _SECRET.sub(HIDDEN, text))
    return text


def _without_secrets(value: Any) -> Any:
    """Redact all texts, and the values whose name says that they are secret."""
    if isinstance(value, dict):
        return {
            redact(str(key)): HIDDEN
            if one and _SECRET_NAME.search(str(key))
            else _without_secrets(one)
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_secrets(one) for one in value]
    return redact(value) if isinstance(value, str) else value


def _lines(facts: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in facts.items():
        name = key.removesuffix("_bytes")
        if isinstance(value, dict) and value:
            if not indent:
                yield ""
            yield f"{indent}{name}"
            yield from _lines(value, indent + "  ")
        elif isinstance(value, list) and value:
            yield f"{indent}{name}"
            for item in value:
                if isinstance(item, dict):
                    first, *rest = _lines(item, indent + "    ")
                    yield f"{indent}  - {first.strip()}"
                    yield from rest
                else:
                    yield f"{indent}  {item}"
        elif key.endswith("_bytes") and isinstance(value, int):
            yield f"{indent}{name}: {gib(value)}"
        else:
            yield f"{indent}{name}: {_word(value)}"


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if value or value == 0 else "none"


LOG_LINES = 20
LONGEST_LINE = 300
T = TypeVar("T")


def look_at_run(run: str, machine: Machine, report: Report, *, nvme: bool = False) -> None:
    """Add a run to a report; with `nvme` its phases that swap are checked by small trainings.

    Raises:
        PipelineError: no configuration defines the run.
    """
    file = find_config(run)
    facts: dict[str, Any] = {"config": str(file), "config_text": _without_comments(file)}
    report.facts["run"] = facts
    parsed = _noting(report, lambda: read_config(file))
    folder = RunFolder(parsed.run if parsed else run).path
    phases = _launched(folder)
    facts["phases"] = {phase.name: _stands(phase) for phase in phases}
    if phases:
        facts["last_phase"] = _last_phase(phases[-1], folder, machine, report)
    if nvme:
        trials = {phase.name: partial(_check_nvme, phase) for phase in phases}
        facts["nvme"] = {name: _noting(report, trial) for name, trial in trials.items()}
    facts["log"] = _last_log(folder)


def _launched(folder: Path) -> list[PhaseView]:
    """List the phases that have a launch, ordered by when they last trained."""

    def trained(phase: PhaseView) -> tuple[float, float]:
        log = phase.places.progress / progress_folder.LOG
        started = log.stat().st_mtime if log.is_file() else 0.0
        return started, -(phase.places.launch / "run.yaml").stat().st_mtime

    launches = folder.glob("*/launch/run.yaml")
    return sorted((PhaseView(path.parents[1]) for path in launches), key=trained)


def _last_phase(view: PhaseView, folder: Path, machine: Machine, report: Report) -> dict[str, Any]:
    launch, progress = view.places.launch, view.places.progress
    facts: dict[str, Any] = {
        "name": view.name,
        "launch_files": [path.name for path in sorted(launch.iterdir())],
        "not_default": {},
        "trains_now": view.trainer is not None,
        "newest_checkpoint": _newest(view),
        "ended": f"code {view.ended.code}: {view.ended.reason}" if view.ended else None,
    }
    phase = _noting(report, lambda: view.launch)
    if phase is not None:
        facts["not_default"] = _not_default(phase)
    if phase is None:
        return facts
    if progress_folder.end_step(progress, phase) is not None:
        return facts
    _noting(report, lambda: machine_check.check(phase, machine, phase.processes_per_machine))
    if not facts["trains_now"]:
        _noting(report, lambda: machine_check.main_process_port(phase, launch))
    needed = dict.fromkeys(("cpu", "nvme"), 0)
    if artifact.is_published(folder / "base"):
        base = _noting(report, lambda: artifact.read(folder / "base", "base", verify=False))
        if base is not None:
            needed = {place: swap_folder.needed_bytes(phase, base, place) for place in needed}
    facts |= {"keeps_in_host_memory_bytes": needed["cpu"], "keeps_on_disk_bytes": needed["nvme"]}
    of_one = needed["cpu"] // phase.launch.machines
    _noting(report, lambda: machine_check.check_host_memory(phase, machine, of_one))
    if phase.swaps:
        facts["offload_path"] = look_at_folder(
            Path(os.path.expandvars(phase.launch.offload_path or ""))
        )
        _noting(report, lambda: machine_check.check_locked_memory(phase, machine, launch))
        _noting(report, lambda: swap_folder.check_disk(phase, needed["nvme"]))
    return facts


def _check_nvme(view: PhaseView) -> str:
    phase = view.launch
    if phase is None or not phase.swaps:
        return "swaps nothing to a disk"
    return nvme_check.check(phase, view.places.launch)


def look_at_folder(folder: Path) -> dict[str, Any]:
    """Return the file system, free space and permission of a folder."""
    if not folder.is_dir():
        return {"path": str(folder), "there": False}
    device, kind = disk.mount(folder)
    usage = shutil.disk_usage(folder)
    return {
        "path": str(folder),
        "file_system": f"{kind} on {device}",
        "free_bytes": usage.free,
        "total_bytes": usage.total,
        "writable": disk.write_trouble(folder) or True,
    }


def _noting(report: Report, look: Callable[[], T]) -> T | None:
    """Return the value of a check; report its error as a problem."""
    try:
        return look()
    except PipelineError as error:
        report.problems.append(f"{error.what}. {error.hint}")
        return None


def _not_default(phase: ResolvedPhase) -> dict[str, str]:
    """Return the values of a phase that are not defaults, each with its source."""
    return {
        name: f"{value} ({source}{f': {reason}' if reason else ''})"
        for name, value, source, reason in phase.explain()
        if source != "default"
    }


def _stands(phase: PhaseView) -> str:
    steps = ", ".join(map(str, phase.steps)) or "none"
    made = artifact.is_published(phase.places.checkpoint)
    stands = "trained, checkpoint published" if made else "unfinished"
    return f"{stands}; rolling checkpoints {steps}"


def _newest(phase: PhaseView) -> dict[str, Any] | None:
    folder = phase.newest_rolling
    if folder is None:
        return None
    step = phase.steps[-1]
    size = sum(path.lstat().st_size for path in folder.rglob("*"))
    found = {"step": step, "folder": str(folder), "size_bytes": size}
    try:
        facts = facts_of(artifact.read_manifest(folder, "checkpoint"))
    except PipelineError:  # training reports the damage
        return found
    ran_on = RanOn.of_manifest(facts, step)
    more = {"ran_on": dict(ran_on.rows()), "changed": [one.text for one in ran_on.changes]}
    return found | {key: value for key, value in more.items() if value}


def _last_log(folder: Path) -> list[str]:
    logs = sorted((folder / "logs").glob("*.log"), key=lambda path: path.lstat().st_mtime)
    if not logs:
        return []
    try:
        lines = read_text(logs[-1], errors="replace").splitlines()[-LOG_LINES:]
    except (OSError, DocumentError) as error:
        return [describe_fault(error)]
    return [f"{logs[-1]}, its last lines:", *(f"| {line[:LONGEST_LINE]}" for line in lines)]


def _without_comments(file: Path) -> list[str]:
    try:
        lines = read_text(file, follow_links=True, errors="replace").splitlines()
    except (OSError, DocumentError) as error:
        return [describe_fault(error)]
    return [f"| {line}" for line in lines if line.strip() and not line.lstrip().startswith("#")]
