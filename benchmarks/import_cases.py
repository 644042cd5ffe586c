"""Import the peers' own configurations and training commands, and count those that come through.

    make import-cases                       # clones the three repositories at the commits below
    make import-cases SIMPLETUNER=DIR DIFFSYNTH=DIR DIFFUSERS=DIR       # clones that are there

A case is a file or command by which one of our families is trained; `PEERS` says which files are
searched, and none of them is left out. Its facts are the keys and values: what a text or
a prompt says, comments and the words around it are not kept. `--facts` writes the facts to
tests/importing/cases, so that the tests import the same cases without the repositories.

Exit code 1: fewer cases are imported than tests/golden/importing/cases records.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from zerotrain.errors import PipelineError
from zerotrain.importers.command import without_comments
from zerotrain.importers.command_line import import_command
from zerotrain.importers.diffusers_examples import is_example
from zerotrain.importers.imported_config import ImportedConfig, ImportProblemsError
from zerotrain.importers.reading import ImportOptions, import_file

ROOT = Path(__file__).parents[1]
FACTS = ROOT / "tests" / "importing" / "cases"
GOLDEN = ROOT / "tests" / "golden" / "importing" / "cases"
OTHER_SCRIPTS = FACTS / "other_scripts.txt"
"""Commands of diffusers' examples that are no cases: none may be taken for another program's."""
PROMPT = "a picture"
"""Stands for every text that a person wrote."""


@dataclass(frozen=True)
class Case:
    """One configuration file, or the commands of one script or fenced block."""

    path: str
    """Its file in the repository; with #N where a page has several."""
    config: Mapping[str, Any] | None = None
    """The keys of a configuration file."""
    commands: list[list[str]] = field(default_factory=list)
    """Or the words of each command line."""
    files: Mapping[str, Any] = field(default_factory=dict)
    """Configuration files that it names, by the names that it uses."""

    def facts(self) -> dict[str, Any]:
        """Return the case as JSON."""
        found = {"config": self.config, "commands": self.commands, "files": dict(self.files)}
        return {name: value for name, value in found.items() if value}

    def read(self) -> ImportedConfig:
        """Import it in an empty folder that holds nothing but the files that it names.

        Raises:
            PipelineError: it cannot be imported.
        """
        options = ImportOptions(presets=ROOT / "config" / "launch")
        with _empty_folder() as folder:
            for name, value in self.files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(json.dumps(value))  # JSON is YAML
            if self.config is None:
                return import_command("\n".join(map(shlex.join, self.commands)), options)
            (folder / "config.json").write_text(json.dumps(self.config))
            return import_file(Path("config.json"), options)


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    imported: ImportedConfig | None
    causes: list[str]
    """Why it is not imported; empty where it is."""

    def golden(self) -> dict[str, Any]:
        """Return the outcome as JSON: our values, or the causes."""
        if self.imported is None:
            return {"causes": self.causes}
        reported = [n for n in self.imported.notes if n.outcome in ("changed", "left out")]
        first = self.imported.before
        return {
            **({"first": first.values} if first else {}),
            "values": self.imported.values,
            "reported": [f"{note.outcome} {note.key}: {note.reason}" for note in reported],
        }


def run(case: Case) -> Outcome:
    """Import a case."""
    try:
        return Outcome(case.read(), [])
    except ImportProblemsError as error:
        return Outcome(None, [_cause(problem) for problem in error.problems])
    except PipelineError as error:
        return Outcome(None, [_cause(error)])


def _cause(error: PipelineError) -> str:
    """Return the error without the name of the file, which differs between cases."""
    return re.sub(r"^[^\s:]+\.(?:json|py|yaml|sh): ", "", error.what)


@contextmanager
def _empty_folder() -> Iterator[Path]:
    before, home = Path.cwd(), os.environ.get("HF_HOME")
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        os.environ["HF_HOME"] = f"{name}/hub"  # accelerate's default_config.yaml is there
        try:
            yield Path(name)
        finally:
            os.chdir(before)
            os.environ.pop("HF_HOME")
            if home is not None:
                os.environ["HF_HOME"] = home


# --- the repositories -------------------------------------------------------------------------


@dataclass(frozen=True)
class Repository:
    """A clone or a bare git folder, at one commit."""

    folder: Path
    commit: str

    def names(self) -> list[str]:
        """Every file."""
        return self._git("ls-tree", "-r", "--name-only", self.commit).splitlines()

    def text(self, name: str) -> str:
        """Return the text of a file."""
        return self._git("show", f"{self.commit}:{name}")

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.folder), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Peer:
    """A program with the commit of its repository, and where its cases are."""

    program: str
    variable: str
    url: str
    commit: str
    find: Callable[[Repository], Iterator[Case]]

    @property
    def file(self) -> str:
        """Name of its file of facts and of its golden one."""
        return f"{self.variable.lower()}.json"


FAMILIES = ("sdxl", "sd3", "flux", "qwen_image")


def find_simpletuner(repository: Repository) -> Iterator[Case]:
    """Every example configuration with one of our families, with the data files that it names."""
    examples = "simpletuner/examples"
    for name in repository.names():
        if not re.fullmatch(rf"{examples}/([^/]+/config|[^/]+)\.json", name):
            continue
        try:
            found = json.loads(repository.text(name))
        except ValueError:
            continue  # one of another family has a comma too many
        inner = found.get("config", found) if isinstance(found, dict) else {}
        plain = {key.lstrip("-"): value for key, value in inner.items()}
        if plain.get("model_family") not in FAMILIES:
            continue
        # The guide copies the examples to config/examples, from where the files name each other.
        named = [plain.get(key) for key in ("data_backend_config", "lycoris_config")]
        files = {
            file: _without_texts(json.loads(repository.text(f"{examples}/{inside}")))
            for file in named
            if file and (inside := file.removeprefix("config/examples/")) != file
        }
        yield Case(name, _without_texts(found), files=files)


def find_diffsynth(repository: Repository) -> Iterator[Case]:
    """Every training script of our families, with the launch files that it names."""
    names = set(repository.names())
    for name in sorted(names):
        if re.fullmatch(
            r"examples/(qwen_image|flux|stable_diffusion_xl)/model_training/.*\.sh", name
        ):
            commands = read_commands(repository.text(name))
            words = {word for command in commands for word in command}
            files = {
                word: YAML(typ="safe").load(repository.text(word))
                for word in sorted(words)
                if word in names and word.endswith((".yaml", ".yml", ".json"))
            }
            for launch in list(files.values()):
                plugin = launch.get("deepspeed_config") or {}
                if (named := plugin.get("deepspeed_config_file")) in names:
                    files[named] = json.loads(repository.text(named))
            yield Case(name, commands=commands, files=files)


PAGES = (
    "examples/dreambooth/README_sdxl.md",
    "examples/dreambooth/README_sd3.md",
    "examples/dreambooth/README_flux.md",
    "examples/dreambooth/README_qwen.md",
    "examples/text_to_image/README_sdxl.md",
)


def find_diffusers(repository: Repository) -> Iterator[Case]:
    """Every fenced command that trains, of the pages on our families.

    A variable keeps the value of a block above. A YAML file stands above the command that wants
    "your accelerate_config.yaml".
    """
    placeholder = "your accelerate_config.yaml"
    for page in PAGES:
        number, launch = 0, None
        variables: dict[str, str] = {}
        for block in read_fences(repository.text(page)):
            if "distributed_type:" in block:
                launch = YAML(typ="safe").load(block)
            commands = read_commands(block.replace(placeholder, placeholder.split()[1]), variables)
            commands = [c for c in commands if any(re.search(r"train_\w+\.py$", w) for w in c)]
            if not commands:
                continue
            number += 1
            used = {word: launch for word in commands[0] if word == placeholder.split()[1]}
            yield Case(f"{page}#{number}", commands=commands, files=used)


def find_other_scripts(repository: Repository) -> list[str]:
    """Return the commands on diffusers' pages that start none of the scripts that are read."""
    found = []
    for page in repository.names():
        if not re.fullmatch(r"(examples|docs/source/en/training)/.*\.md", page):
            continue
        variables: dict[str, str] = {}
        for block in read_fences(repository.text(page)):
            try:
                commands = read_commands(block, variables)
            except ValueError:  # it ends in a backslash
                continue
            for words in commands:
                script = next((word for word in words if word.endswith(".py")), None)
                flags = [word for word in words if word.startswith("--")]
                if script is not None and not is_example(script) and len(flags) > 4:
                    found.append(re.sub(r"(?<=[ =])/[^\s']+", "/a/path", shlex.join(words)))
    return list(dict.fromkeys(found))


def read_fences(text: str) -> list[str]:
    """Return the fenced blocks of a page."""
    blocks: list[str] = []
    inside: list[str] | None = None
    for line in text.splitlines():
        if not line.strip().startswith("```"):
            if inside is not None:
                inside.append(line)
        elif inside is None:
            inside = []
        else:
            blocks.append("\n".join(inside))
            inside = None
    return blocks


def read_commands(text: str, variables: dict[str, str] | None = None) -> list[list[str]]:
    """Return the words of a shell script's launched commands, with variables and texts replaced.

    Args:
        text: The script.
        variables: What is exported already; gets what this text exports.
    """
    variables = {} if variables is None else variables
    found = []
    for line in re.sub(r"\\\s*\n", " ", without_comments(text)).splitlines():
        if assigned := re.fullmatch(r"\s*(?:export\s+)?(\w+)=(\S+|\"[^\"]*\"|'[^']*')\s*", line):
            variables[assigned[1]] = assigned[2].strip("\"'")
            continue
        if not re.match(r"\s*(accelerate launch|torchrun|deepspeed|python)\b", line):
            continue
        line = re.sub(r"\$\{?(\w+)\}?", lambda m: variables.get(m[1], m[0]), line)
        found.append(_words_without_texts(shlex.split(line)))
    return found


TEXTS = re.compile(r"(prompt|description|caption)s?$")


def _words_without_texts(words: list[str]) -> list[str]:
    found: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if equals and TEXTS.search(name):
            word = f"{name}={_without_texts(value, name)}"
        elif not word.startswith("-") and found and found[-1].startswith("-"):
            word = _without_texts(word, found[-1])
        elif not word.startswith("-") and found[-1:] == [PROMPT]:
            continue  # a further text of the same flag
        found.append(word)
    return found


def _without_texts(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {k: _without_texts(v, k) for k, v in value.items() if not k.startswith("_")}
    if isinstance(value, list):
        return [_without_texts(v, key) for v in value]
    is_text = isinstance(value, str) and TEXTS.search(key) and not re.fullmatch(r"[\d.]+", value)
    return PROMPT if is_text else value


PEERS = (
    Peer(
        "SimpleTuner",
        "SIMPLETUNER",
        "https://github.com/bghira/SimpleTuner",
        "bc8e6ab7738ce457a2ed8eb2d26cadd91c6442cb",
        find_simpletuner,
    ),
    Peer(
        "DiffSynth-Studio",
        "DIFFSYNTH",
        "https://github.com/modelscope/DiffSynth-Studio",
        "fed7b18fac2ed4cb802796eec91970e7659bccde",
        find_diffsynth,
    ),
    Peer(
        "diffusers",
        "DIFFUSERS",
        "https://github.com/huggingface/diffusers",
        "58eb52c0803ea9af3abec60841c2a093bdf1f951",
        find_diffusers,
    ),
)


# --- facts, table -----------------------------------------------------------------------------


def read_facts(peer: Peer) -> list[Case]:
    """Read the cases as tests/importing/cases keeps them."""
    found = json.loads((FACTS / peer.file).read_text())
    return [Case(path, **facts) for path, facts in found["cases"].items()]


def facts_text(peer: Peer, cases: list[Case]) -> str:
    """Return the text of a file of facts."""
    facts = {case.path: case.facts() for case in cases}
    return as_json({"repository": peer.url, "commit": peer.commit, "cases": facts})


def golden_text(outcomes: Mapping[str, Outcome]) -> str:
    """Return the text of a golden file."""
    return as_json({path: outcome.golden() for path, outcome in outcomes.items()})


def as_json(value: Any) -> str:
    """JSON with short lists on one line."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    flat = re.sub(r"\[\s+([^\[\]{}]{0,2000}?)\s+\]", lambda m: f"[{_joined(m[1])}]", text)
    return flat + "\n"


def _joined(inside: str) -> str:
    return re.sub(r",\s*\n\s*", ", ", inside)


def table(outcomes: Mapping[str, Outcome]) -> str:
    """Format a line for each case, and one for each cause."""
    lines = []
    for path, outcome in outcomes.items():
        lines.append(f"{'no ' if outcome.causes else 'yes'}  {path}")
        lines += [f"       {cause}" for cause in outcome.causes]
    return "\n".join(lines)


def by_cause(outcomes: Mapping[str, Outcome]) -> Counter[str]:
    """How many cases each cause stops."""
    return Counter(cause for outcome in outcomes.values() for cause in {*outcome.causes})


def main() -> int:
    """Import every case of every repository; 1 where fewer are imported than recorded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--facts", action="store_true", help="write tests/importing/cases")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "zerotrain-peers")
    for peer in PEERS:
        parser.add_argument(f"--{peer.variable.lower()}", type=Path, metavar="DIR")
    options = parser.parse_args()
    fewer = False
    for peer in PEERS:
        folder = getattr(options, peer.variable.lower()) or _clone(peer, options.cache)
        cases = list(peer.find(Repository(folder, peer.commit)))
        if options.facts:
            FACTS.mkdir(parents=True, exist_ok=True)
            (FACTS / peer.file).write_text(facts_text(peer, cases))
            if peer.program == "diffusers":
                commands = find_other_scripts(Repository(folder, peer.commit))
                OTHER_SCRIPTS.write_text("\n".join(commands) + "\n")
        outcomes = {case.path: run(case) for case in cases}
        print(f"## {peer.program} {peer.commit[:12]}\n{table(outcomes)}\n")
        for cause, count in by_cause(outcomes).most_common():
            print(f"{count:4}  {cause}")
        count = sum(not outcome.causes for outcome in outcomes.values())
        golden = GOLDEN / peer.file
        recorded = 0
        if golden.is_file():
            recorded = sum("values" in case for case in json.loads(golden.read_text()).values())
        print(f"\n{peer.program}: {count} of {len(cases)} imported (recorded: {recorded})\n")
        fewer |= count < recorded
    return int(fewer)


def _clone(peer: Peer, cache: Path) -> Path:
    """Clone a repository at the commit, without the history before it."""
    folder = cache / peer.variable.lower()
    if not folder.is_dir():
        folder.mkdir(parents=True)
        for command in (
            ["init", "--quiet"],
            ["fetch", "--quiet", "--depth", "1", peer.url, peer.commit],
        ):
            subprocess.run(["git", "-C", str(folder), *command], check=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
