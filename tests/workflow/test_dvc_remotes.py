"""What a run made comes back from a remote (a folder, S3, SSH), and what it has lost is named."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from tests.builders.git import init_repository, set_author

ROOT = Path(__file__).parents[2]
SHIPPED = (".dvc/config", ".dvc/.gitignore", ".dvcignore")
SSHD = Path("/usr/sbin/sshd")
SHARDS = 3
MAKE = f"""\
import hashlib, json, random
from pathlib import Path

folder = Path("results/cache")
folder.mkdir(parents=True)
sums = {{}}
for number in range({SHARDS}):
    content = random.Random(number).randbytes(1_500_000)
    (folder / f"shard-{{number}}.safetensors").write_bytes(content)
    sums[f"shard-{{number}}.safetensors"] = hashlib.sha256(content).hexdigest()
(folder / "manifest.json").write_text(json.dumps(sums))
"""
STAGE = {"cmd": f"{sys.executable} make.py", "deps": ["make.py"], "outs": ["results/cache"]}


@dataclass
class Remote:
    """A place for DVC's objects.

    `settings` are those that a project commits, `secrets` those of its user alone, who sets both:
    a secret without its URL makes the commits from before that URL unreadable to DVC. `remove`
    takes an object away behind DVC's back, by its path in the remote.
    """

    remove: Callable[[str], object]
    settings: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)


class Project:
    """A project under Git and DVC, with the shipped settings of DVC and of no one else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
        self.environment = kept | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.defpath]),
            **{f"DVC_{name}": str(folder.parent / "dvc") for name in DVC_FOLDERS},
            "AWS_EC2_METADATA_DISABLED": "true",
            "HOME": str(folder.parent / "home"),
        }

    def run(self, *words: str) -> tuple[int, str]:
        """A command's exit code, and what it printed."""
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout

    def __call__(self, *words: str) -> str:
        """What a command printed that has to end well."""
        code, said = self.run(*words)
        assert code == 0, f"{words}: {said}"
        return said

    def use(self, settings: dict[str, str], *flags: str) -> None:
        """Change settings of the shipped remote, as docs/remotes.md says."""
        for name, value in settings.items():
            self("dvc", "remote", "modify", *flags, "storage", name, value)

    def commit(self) -> None:
        """Put under Git all that Git may see."""
        self("git", "add", ".")
        self("git", "commit", "-qm", "a run", "--allow-empty")

    def clone(self, name: str) -> Project:
        """A fresh clone next to it."""
        self("git", "clone", "-q", ".", str(self.folder.with_name(name)))
        made = Project(self.folder.with_name(name))
        set_author(made)
        return made

    def contents(self) -> dict[str, bytes]:
        """The bytes of each result, by its path."""
        found = (self.folder / "results").rglob("*")
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in found
            if path.is_file()
        }

    def cached(self) -> list[Path]:
        """The objects in the project's own cache."""
        found = (self.folder / ".dvc" / "cache" / "files").rglob("*")
        return [path for path in found if path.is_file()]

    def objects(self) -> dict[str, str]:
        """The path in a remote of the tracked folder, and of each file in it, by name."""
        lock = yaml.safe_load((self.folder / "dvc.lock").read_text())
        listed = _object(lock["stages"]["make"]["outs"][0]["md5"])
        files = json.loads((self.folder / ".dvc" / "cache" / listed).read_text())
        return {"": listed} | {file["relpath"]: _object(file["md5"]) for file in files}


OWN = ("AWS_", "DVC_", "GIT_")
DVC_FOLDERS = ("SITE_CACHE_DIR", "GLOBAL_CONFIG_DIR", "SYSTEM_CONFIG_DIR")


def _object(md5: str) -> str:
    return f"files/md5/{md5[:2]}/{md5[2:]}"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project whose one stage has made a folder of shards and a manifest."""
    folder = tmp_path / "project"
    for name in SHIPPED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / ".gitignore").write_text("results/\n")
    (folder / "make.py").write_text(MAKE)
    (folder / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"make": STAGE}}))
    project = Project(folder)
    init_repository(project)
    project("dvc", "repro", "-q")
    assert len(project.contents()) == SHARDS + 1
    return project


@pytest.fixture
def local(tmp_path: Path) -> Remote:
    """The shipped remote, untouched: a folder in the user's home."""
    return Remote(remove=lambda path: (tmp_path / "home" / "zerotrain-remote" / path).unlink())


@pytest.fixture
def s3() -> Iterator[Remote]:
    """A bucket of an S3 server on this machine."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    secrets = {"access_key_id": "testing-id", "secret_access_key": "testing-secret"}
    names = {f"aws_{name}": value for name, value in secrets.items()}
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **names)
    client.create_bucket(Bucket="runs")
    yield Remote(
        remove=lambda path: client.delete_object(Bucket="runs", Key=f"digits/{path}"),
        settings={"url": "s3://runs/digits", "endpointurl": endpoint},
        secrets=secrets,
    )
    server.stop()


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[Remote]:
    """An SSH server of this user on this machine, which takes one key."""
    if not SSHD.is_file():
        pytest.skip(f"{SSHD} is missing: `apt-get install openssh-server`; no service has to run")
    home = tmp_path / "sshd"
    home.mkdir()
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", home / name], check=True
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (home / "config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {home}/host\nAuthorizedKeysFile {home}/user.pub\n"
        "PidFile none\nUsePAM no\nPasswordAuthentication no\nStrictModes no\n"
        "Subsystem sftp internal-sftp\n"
    )
    if os.geteuid() == 0:  # what a booted system has made: as root, sshd wants it
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with (home / "log").open("w") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", home / "config"], stderr=log)
    try:
        _wait_for(port, server, home / "log")
        yield Remote(
            remove=lambda path: (tmp_path / "elsewhere" / path).unlink(),
            settings={"url": f"ssh://127.0.0.1:{port}{tmp_path}/elsewhere"},
            secrets={"user": getpass.getuser(), "keyfile": str(home / "user")},
        )
    finally:
        server.terminate()
        server.wait()


def _wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert server.poll() is None, log.read_text(encoding="utf-8")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(log.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "local",
        pytest.param("s3", marks=pytest.mark.slow),
        pytest.param("ssh", marks=pytest.mark.slow),
    ],
)
def test_a_clone_pulls_what_was_pushed(
    kind: str, project: Project, request: pytest.FixtureRequest
) -> None:
    """The same bytes, nothing left to do for DVC, no secret in Git, the commit from before the
    remote moved included. An object that the remote has lost is an error with its name, and what
    docs/remotes.md says brings it back."""
    remote: Remote = request.getfixturevalue(kind)
    own = remote.settings | remote.secrets
    project.commit()
    project.use(remote.settings)
    project.use(own, "--local")
    project.commit()
    tracked = project("git", "grep", "-h", "", "--", ".")
    assert not [secret for secret in remote.secrets.values() if f"= {secret}\n" in tracked]
    assert project("git", "status", "--short") == ""
    objects = project.objects()
    said = project("dvc", "push", "--all-commits")
    assert f"{len(objects)} files pushed" in said
    assert "skipping" not in said

    clone = project.clone("clone")
    clone.use(own, "--local")
    assert clone.contents() == {}
    clone("dvc", "pull", "-q")
    assert clone.contents() == project.contents()
    assert "up to date" in clone("dvc", "status")
    assert "in sync" in clone("dvc", "status", "-c")

    remote.remove(objects["shard-1.safetensors"])
    other = project.clone("other")
    other.use(own, "--local")
    code, said = other.run("dvc", "pull")
    assert code != 0
    assert objects["shard-1.safetensors"].replace("files/md5", "").replace("/", "") in said
    missing = [line.split() for line in other("dvc", "status", "-c").splitlines()]
    assert missing == [["deleted:", "results/cache/shard-1.safetensors"]]

    # The folder's listing is there: it looks no further.
    assert "up to date" in project("dvc", "push")
    remote.remove(objects[""])
    assert "2 files pushed" in project("dvc", "push")
    other("dvc", "pull", "-q")
    assert other.contents() == project.contents()


@pytest.mark.slow
def test_the_shipped_remote_holds_earlier_runs(project: Project) -> None:
    """What earlier commits made is pushed to the same folder; a clone moves the folder for itself
    alone, and Git sees nothing of that."""
    project.commit()
    first = project.contents()
    make = project.folder / "make.py"
    make.write_text(make.read_text().replace("1_500_000", "1_600_000"))
    project("dvc", "repro", "-q")
    project.commit()
    assert f"{2 * (SHARDS + 2)} files pushed" in project("dvc", "push", "--all-commits")
    home = project.folder.parent / "home" / "zerotrain-remote"
    assert len([path for path in home.rglob("*") if path.is_file()]) == 2 * (SHARDS + 2)

    home.rename(project.folder.parent / "moved")
    clone = project.clone("clone")
    assert clone.run("dvc", "pull")[0] != 0
    clone.use({"url": str(project.folder.parent / "moved")}, "--local")
    clone("dvc", "pull", "-q")
    assert clone.contents() == project.contents()
    clone("git", "checkout", "-q", "HEAD~1")
    clone("dvc", "pull", "-q")
    assert clone.contents() == first
    assert clone("git", "status", "--short") == ""


@pytest.mark.slow
def test_the_cache_is_emptied_but_for_what_only_it_has(project: Project) -> None:
    """What docs/remotes.md says for a full disk keeps a commit that was never pushed, though
    another lies here, and what it removes comes back."""
    project.commit()
    first = project.contents()
    project("dvc", "push", "-q")
    pushed = set(project.cached())
    make = project.folder / "make.py"
    make.write_text(make.read_text().replace("1_500_000", "1_600_000"))
    project("dvc", "repro", "-q")
    project.commit()
    second = project.contents()
    project("git", "checkout", "-q", "HEAD~1")
    project("dvc", "checkout", "-q")

    alone = set(project.cached()) - pushed
    project("dvc", "gc", "-A", "--all-experiments", "--not-in-remote", "-f")
    assert set(project.cached()) == alone
    assert project.contents() == first
    project("git", "checkout", "-q", "-")
    project("dvc", "checkout", "--force")
    assert project.contents() == second
    project("git", "checkout", "-q", "-")
    project("dvc", "pull", "--force")
    assert project.contents() == first
