"""Set-up of .venv: environment, packages, DeepSpeed's compiled ops. Run by make before all else.

Standard library only, and it parses under Python 3.6, so that an old interpreter gets a sentence
and no SyntaxError. Whatever is missing is one sentence and the command that fixes it, exit code 2.
The stamp is written last, so the call after an interrupted one resumes it.
"""

import ast
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Iterator, NoReturn  # noqa: UP035 (of Python 3.6)

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / "bin" / "python"
UV = VENV / "bin" / "uv"
LOG = VENV / "setup.log"
OPS_LOG = VENV / "ops.log"
STAMP = VENV / "setup.json"
LOCK = ".setup-lock"
CONSTRAINTS = ROOT / "envs" / "constraints.txt"
CUDA = ROOT / "envs" / "cuda.txt"
INPUTS = (CONSTRAINTS, CUDA, ROOT / "pyproject.toml")

OLDEST = (3, 11)
COMPILERS = ("c++", "g++", "clang++")
FREE_GB = 5
"""With torch's CPU build the environment takes 2 GB and its downloads 1 GB; the rest: results."""
FREE_GB_CUDA = 20
"""torch's CUDA build brings about 8 GB of libraries, and their downloads half of that again."""

BUILD_NEEDS = ("torch", "setuptools", "packaging", "psutil", "py-cpuinfo", "ninja", "numpy")
"""Installed first: deepspeed ships as source, and its build asks for all of them."""

AGAIN = "then run make again: set-up resumes where it stopped"
FAILURES = (
    (
        ("Hash mismatch", "DO NOT MATCH THE HASHES", "Hashes are required", "`--require-hashes`"),
        "the package index gives a file that is not the pinned one",
        "find the package and both hashes in the log; where you trust another build of torch, add "
        "its hash to torch's line in envs/constraints.txt, else install from an index that has the "
        f"published files, {AGAIN}",
    ),
    (
        ("No space left on device",),
        "the disk is full",
        f"free some; torch's CUDA build needs {FREE_GB_CUDA} GB in all, {AGAIN}",
    ),
    (
        (
            *("NewConnectionError", "name resolution", "timed out", "ProxyError", "ConnectTimeout"),
            *("dns error", "tcp connect error", "Connection refused"),
        ),
        "the package index cannot be reached",
        f"check the network, behind a proxy `export HTTPS_PROXY=...`, {AGAIN}",
    ),
    (
        ("SSLError", "CERTIFICATE_VERIFY_FAILED", "invalid peer certificate"),
        "the package index shows a certificate that is not trusted here",
        f"`export PIP_CERT=FILE` with your network's certificates, {AGAIN}",
    ),
    (
        ("No matching distribution found", "No solution found"),
        "a pinned version has no build for this Python or machine",
        "try `make PYTHON=python3.11 setup`",
    ),
)


def stop(what: str, hint: str) -> NoReturn:
    """End set-up with one sentence and the command that fixes it."""
    print(f"\nERROR: set-up: {what}.\n  Hint: {hint}", file=sys.stderr)
    sys.exit(2)


def digest() -> str:
    """Of all that decides what is installed, and where: an environment cannot be moved."""
    content = [str(VENV).encode()] + [path.read_bytes() for path in INPUTS]
    return hashlib.sha256(b"\0".join(content)).hexdigest()


def is_done() -> bool:
    """Whether a set-up with these inputs ended well and its Python is still there."""
    try:
        return json.loads(STAMP.read_text(encoding="utf-8"))["digest"] == digest() and os.access(
            str(BIN), os.X_OK
        )
    except (OSError, ValueError, KeyError):
        return False


def check_machine() -> None:
    """Stop at the first thing that is missing, before anything is written."""
    if sys.version_info[:2] < OLDEST:
        newer = ("python3.11", "python3.12", "python3.13", "python3.14")
        found = next((name for name in newer if _runs(name)), None)
        stop(
            "Python {}.{} is too old, 3.11 or newer is needed".format(*sys.version_info[:2]),
            f"run `make PYTHON={found} setup`"
            if found
            else "`apt-get install python3.11 python3.11-venv python3.11-dev`, "
            "then `make PYTHON=python3.11 setup`",
        )
    python = "python{}.{}".format(*sys.version_info[:2])
    if not _has_ensurepip():
        stop(f"{python} has no venv and ensurepip", f"`apt-get install {python}-venv`")
    compilers = (os.environ.get("CXX", ""), *COMPILERS)
    if not any(shutil.which(name.split()[0]) for name in compilers if name):
        stop(
            "no C++ compiler found (c++, g++, clang++ or $CXX)",
            "`apt-get install g++` on Debian or Ubuntu, `dnf install gcc-c++` on Fedora",
        )
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        stop(f"{python} has no header files (Python.h)", f"`apt-get install {python}-dev`")
    if any(character.isspace() for character in str(ROOT)):
        stop(f"the compilers cannot work in a path with spaces: {ROOT}", f'`mv "{ROOT}" /a/path`')
    _check_disk()


def _runs(python: str) -> bool:
    """Whether a command of that name starts; a version manager's stub may only say it cannot."""
    quiet = subprocess.DEVNULL
    return bool(shutil.which(python)) and not subprocess.call(
        [python, "-c", ""], stdout=quiet, stderr=quiet
    )


def _has_ensurepip() -> bool:
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return False
    return True


def _check_disk() -> None:
    if STAMP.exists():  # only the difference to the last set-up is installed
        return
    need = FREE_GB_CUDA if shutil.which("nvidia-smi") else FREE_GB
    free = shutil.disk_usage(str(ROOT)).free / 1e9
    if free < need:
        stop(
            f"{free:.1f} GB are free at {ROOT}, {need} GB are needed",
            f"free some (`du -sh {ROOT}/*` shows where it went), {AGAIN}",
        )


def check_environment() -> None:
    """Stop where .venv is not ours to change: a link, or an environment of something else."""
    if VENV.is_symlink():
        stop(
            f".venv is a link, to {os.path.realpath(str(VENV))}, and set-up removes nothing there",
            f"`rm {VENV}` removes the link alone, {AGAIN}",
        )
    is_ours = (VENV / LOCK).exists() or not VENV.is_dir() or not any(VENV.iterdir())
    if not is_ours and not _is_healthy():
        stop(
            f"{VENV} is not from set-up, and has no Python with a pip of its own",
            f"`mv {VENV} {VENV}.old` keeps it, {AGAIN}",
        )


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Hold the set-up lock; the kernel frees a killed holder's."""
    VENV.mkdir(exist_ok=True)
    with (VENV / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another set-up is at work in .venv; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_environment() -> None:
    """Make .venv, or repair what an interrupted or moved one left."""
    shutil.rmtree(str(VENV / "tmp"), ignore_errors=True)
    if not _is_healthy():
        for path in VENV.iterdir():
            if path.name not in (LOCK, LOG.name):
                shutil.rmtree(
                    str(path)
                ) if path.is_dir() and not path.is_symlink() else path.unlink()
        python = getattr(sys, "_base_executable", sys.executable)
        run(
            "environment .venv, Python {}.{}.{}".format(*sys.version_info),
            python,
            "-m",
            "venv",
            VENV,
        )
    for packages in VENV.glob("lib/python3*/site-packages"):
        for path in packages.iterdir():
            # pip writes RECORD last, uv INSTALLER; pip renames what it removes to ~name.
            unfinished = path.name.endswith(".dist-info") and not (
                (path / "RECORD").exists() and (path / "INSTALLER").exists()
            )
            if unfinished or path.name.startswith("~"):
                shutil.rmtree(str(path), ignore_errors=True)


def _is_healthy() -> bool:
    """Whether .venv has a Python and a pip of its own that run, and lies where it was made."""
    check = "import sys, pip; print(sys.prefix)"
    try:
        found = subprocess.run([str(BIN), "-c", check], capture_output=True, text=True, check=True)
        moved = str(VENV) not in (VENV / "bin" / "activate").read_text(encoding="utf-8")
    except (OSError, subprocess.CalledProcessError):
        return False
    return Path(found.stdout.strip()) == VENV and not moved


def install() -> None:
    """Install the pinned packages, each file by its hash, and begin to compile DeepSpeed's ops.

    pip installs uv alone, which installs the rest in a fraction of pip's time. What is built from
    source uses the pinned build tools (--no-build-isolation): an isolated build would fetch others.
    """
    keep_bytecode()
    pinned = pins()
    only_uv = write_pins("uv.txt", [pinned["uv"]])
    pip = [BIN, "-m", "pip", "install", "--no-input", "--require-hashes"]
    run(f"uv {version(pinned['uv'])}", *pip, "-r", only_uv, explain=FAILURES)
    settings = pip_settings(BIN)
    env = uv_settings(settings)
    offline = ["--no-index"] if settings.get("no-index", "").lower() in TRUE else []
    uv = [UV, "pip", "install", "--python", BIN, "--no-build-isolation", *offline]
    pinned["torch"] = of_build(pinned["torch"], torch_build(offline, env))
    all_pins = write_pins("pins.txt", list(pinned.values()))
    checked = [*uv, "--require-hashes", "-c", all_pins, "-c", CUDA]
    needs = write_pins("needs.txt", [pinned[name] for name in BUILD_NEEDS])
    run(f"torch {version(pinned['torch'])}", *checked, "-r", needs, env=env, explain=FAILURES)
    source = write_pins("deepspeed.txt", [pinned["deepspeed"]])
    label = f"deepspeed {version(pinned['deepspeed'])}"
    run(label, *checked, "-r", source, env=env, explain=FAILURES)
    compile_ops()
    run(f"{len(pinned)} packages", *checked, "-r", all_pins, env=env, explain=FAILURES)
    run("zerotrain", *uv, "--no-deps", "-e", ROOT, env=env, explain=FAILURES)


def pins(file: Path = CONSTRAINTS) -> dict[str, str]:
    """Return the line of each pinned package by its name: version, condition and hashes."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return {line.split("==")[0]: line for line in lines if "==" in line and line[0] != "#"}


def version(pin: str) -> str:
    """Return the version that a line pins."""
    return pin.split()[0].split("==")[1]


def of_build(pin: str, build: str) -> str:
    """Return the line of a pin for one of its builds: 2.13.0+cpu, say.

    Only to pip are the builds of a version the same; uv looks for the hashes of this very one, and
    pip prefers a build whose hash is known before it is read.
    """
    return pin.replace(version(pin), build, 1)


def write_pins(name: str, lines: "list[str]") -> Path:
    """Write pins to a file of .venv, which is removed at the end."""
    folder = VENV / "tmp"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / name


def torch_build(offline: "list[str]", env: "dict[str, str]") -> str:
    """Return the version of torch that this machine takes, with its build."""
    torch = write_pins("torch.txt", [pins()["torch"].split()[0]])
    found = write_pins("found.txt", [])
    plain = ["--no-deps", "--no-header", "--no-annotate", "--output-file", found]
    command = [UV, "pip", "compile", "--python", BIN, *offline, *plain, torch]
    run("torch's build", *command, env=env, explain=FAILURES)
    return version(found.read_text(encoding="utf-8"))


def keep_bytecode() -> None:
    """Let every Python of .venv keep the bytecode of what it imports.

    Images of containers set PYTHONDONTWRITEBYTECODE, with which each process would compile torch,
    diffusers and DeepSpeed again. To compile all packages here would take a minute.
    """
    for packages in VENV.glob("lib/python3*/site-packages"):
        line = "import sys; sys.dont_write_bytecode = False\n"
        (packages / "keep_bytecode.pth").write_text(line, encoding="utf-8")


TRUE = ("1", "true", "yes", "on")
KEYRINGS = {"import": "subprocess", "subprocess": "subprocess", "disabled": "disabled"}
"""uv's value for each keyring-provider of pip; uv knows no other than the command `keyring`."""


def pip_settings(python: object) -> dict[str, str]:
    """Return the settings of pip's files and variables by option; a variable overrides a file."""
    command = [str(python), "-m", "pip", "config", "list"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    settings = {}
    for line in found.splitlines():
        name, _, value = line.partition("=")
        place, _, option = name.rpartition(".")
        if place == ":env:" or option not in settings:
            settings[option] = ast.literal_eval(value)
    return settings


def uv_settings(pip: dict) -> dict[str, str]:  # type: ignore[type-arg]
    """Variables by which uv looks where pip looks; what the user set for uv itself comes first."""
    indexes = " ".join(pip.get("extra-index-url", "").split())
    found = {
        "UV_DEFAULT_INDEX": pip.get("index-url", ""),
        "UV_INDEX": indexes,
        "UV_FIND_LINKS": ",".join(pip.get("find-links", "").split()),
        "UV_HTTP_TIMEOUT": pip.get("default-timeout", "") or pip.get("timeout", ""),
        "SSL_CERT_FILE": pip.get("cert", ""),
        "SSL_CLIENT_CERT": pip.get("client-cert", ""),
        "UV_INSECURE_HOST": pip.get("trusted-host", ""),
        "UV_KEYRING_PROVIDER": KEYRINGS.get(pip.get("keyring-provider", ""), ""),
        "HTTP_PROXY": pip.get("proxy", ""),
        "HTTPS_PROXY": pip.get("proxy", ""),
        # pip takes a pinned version from whichever index has it.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    return {name: value for name, value in found.items() if value and name not in os.environ}


def download(folder: Path) -> None:
    """Put the pinned packages into a folder, for a set-up without a network.

    It runs in an environment that is set up, of which it takes torch's build: to say what it needs,
    deepspeed asks for torch. Only pip downloads without installing.
    """
    from importlib.metadata import distributions

    installed = {each.metadata["Name"].lower(): each.version for each in distributions()}
    pinned = pins()
    pinned["torch"] = of_build(pinned["torch"], installed["torch"])
    cuda = [line for name, line in pins(CUDA).items() if name in installed]
    needs = write_pins("pins.txt", [*pinned.values(), *cuda])
    pip = [sys.executable, "-m", "pip", "download", "--no-input", "--no-build-isolation"]
    hashed = ["--no-deps", "--require-hashes", "-r", needs]
    run(f"packages for {folder}", *pip, "-d", folder, *hashed, explain=FAILURES)
    shutil.rmtree(str(VENV / "tmp"), ignore_errors=True)


def compile_ops() -> None:
    """Compile DeepSpeed's ops in the background, about a minute on two cores.

    What runs meanwhile goes first. A training that needs the ops waits for them, and builds what is
    missing, with its own sentence.
    """
    with OPS_LOG.open("w") as log:
        subprocess.Popen(
            [str(BIN), "-m", "zerotrain.machine.compiled_ops"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=kept_environment(),
            cwd=str(ROOT / "workflow"),  # they are built before the project is installed
            start_new_session=True,  # it outlives set-up
            preexec_fn=yield_to_others,
        )


def yield_to_others() -> None:
    """Let all other processes go first: Linux shares cores among sessions, then in each of them.

    Source: sched(7), "The autogroup feature".
    """
    os.nice(19)
    try:
        with open("/proc/self/autogroup", "w", encoding="utf-8") as stream:
            stream.write("19")
    except OSError:  # a kernel without it
        pass


def kept_environment() -> "dict[str, str]":
    """Return the variables for a command of set-up."""
    return {key: value for key, value in os.environ.items() if key not in UNWANTED}


def run(
    label: str,
    *command: object,
    explain: tuple = (),  # type: ignore[type-arg]
    env: "dict[str, str] | None" = None,
    may_fail: bool = False,
) -> bool:
    """Run a step of set-up to its end; whether it ended well, where it may fail."""
    with Step(label, *command, env=env) as step:
        return step.finish(explain, may_fail=may_fail)


class Step:
    """A running command of set-up: its output goes to the log, its seconds to the screen."""

    def __init__(self, label: str, *command: object, env: "dict[str, str] | None" = None) -> None:
        self.label = label
        self.start = time.monotonic()
        folder = VENV / "tmp"  # one disk to check, and /tmp may be small
        folder.mkdir(parents=True, exist_ok=True)
        self.output = folder / "{}.log".format("".join(filter(str.isalnum, label)))
        with self.output.open("w") as output:
            print(f"\n$ {' '.join(map(str, command))}", file=output, flush=True)
            self.child = subprocess.Popen(
                [str(word) for word in command],
                stdout=output,
                stderr=output,
                env=dict(kept_environment(), TMPDIR=str(folder), **(env or {})),
            )

    def __enter__(self) -> "Step":
        return self

    def __exit__(self, *raised: object) -> None:
        """End what still runs, and keep its output."""
        if self.child.poll() is None:
            self.child.terminate()
            self.child.wait()
        if self.output.exists():
            with LOG.open("a") as log:
                log.write(self.output.read_text(errors="replace", encoding="utf-8"))
            self.output.unlink()

    def finish(self, explain: tuple = (), *, may_fail: bool = False) -> bool:  # type: ignore[type-arg]
        """Wait for the end and show the seconds; stop set-up where the command failed."""
        while self.child.poll() is None:
            self._show("\r" if sys.stdout.isatty() else "")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(1)
        well = self.child.returncode == 0
        self._show("\n" if well else " failed\n")
        if not well and not may_fail:
            output = self.output.read_text(errors="replace", encoding="utf-8")
            self.__exit__()
            fail(self.label, output.split("\n", 2)[2], explain)
        return well

    def _show(self, end: str) -> None:
        """One line for a step; while it runs only where a terminal can overwrite it."""
        if end:
            seconds = time.monotonic() - self.start
            print(f"  {self.label:<40} {seconds:4.0f} s", end=end, flush=True)


UNWANTED = {"PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "VIRTUAL_ENV"}
"""Settings that would install packages outside .venv."""


def fail(label: str, output: str, explain: tuple) -> NoReturn:  # type: ignore[type-arg]
    """Stop with the cause where it is known, else with the last lines of the step's output."""
    if "ERROR: " in output and "  Hint: " in output:  # a sentence of our own
        print(output[output.rindex("ERROR: ") :].rstrip(), file=sys.stderr)
        sys.exit(2)
    for marks, what, hint in explain:
        if any(mark in output for mark in marks):
            stop(what, f"{hint} (log: {LOG})")
    tail = "".join(f"\n    {line}" for line in output.strip().splitlines()[-8:])
    stop(f"the step '{label}' failed, its last lines are{tail}", f"read {LOG}, {AGAIN}")


def main() -> None:
    """Set up what is missing; silent and quick when nothing is."""
    if is_done():
        return
    check_machine()
    check_environment()
    start = time.monotonic()
    with only_one():
        if is_done():
            return
        print(
            "set-up of .venv, once: half a minute with a fast network (log: .venv/setup.log)",
            flush=True,
        )
        make_environment()
        install()
        shutil.rmtree(str(VENV / "tmp"), ignore_errors=True)
        new = STAMP.with_suffix(".new")
        new.write_text(json.dumps({"digest": digest()}) + "\n", encoding="utf-8")
        new.replace(STAMP)
    print(
        f"set-up done in {time.monotonic() - start:.0f} s; DeepSpeed's ops are compiled in the "
        "background, about a minute more (log: .venv/ops.log)",
        flush=True,
    )


if __name__ == "__main__":
    try:
        if sys.argv[1:2] == ["--download"]:
            download(Path(sys.argv[2]))
        else:
            main()
    except KeyboardInterrupt:
        print("\nset-up interrupted; the next make resumes it", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        stop(f"{error}", f"free the disk, or fix the permissions of {VENV}, {AGAIN}")
