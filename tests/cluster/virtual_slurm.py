"""A real Slurm on this machine alone: two nodes with two GPUs each that are none, for tests.

    python -m tests.cluster.virtual_slurm    # starts one, says how to use it, ends at Ctrl-C

It needs Debian's packages, no root, and about a second. Any local user may submit to it while it
runs (auth/none). Its node names do not resolve: all nodes are this machine.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client"
NODES, CPUS, MEMORY_MB, GPUS = ("n1", "n2"), 4, 8000, 2
SYSTEM = "/usr/sbin:/usr/bin:/sbin:/bin"
COMMANDS = (
    *("srun", "sbatch", "salloc", "scancel", "squeue", "sinfo", "scontrol"),
    *("sacct", "sacctmgr", "sshare", "sstat"),
)
START_SECONDS, STOP_SECONDS = 20.0, 20.0
CONFIGURATION = """
ClusterName=virtual
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=2,bf_interval=2,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
ReturnToService=2
MinJobAge=86400
KillWait=5
SlurmdTimeout=20
PartitionName=cpu Nodes=ALL Default=YES MaxTime=2-00:00:00 PriorityTier=10
PartitionName=gpu Nodes=ALL MaxTime=2-00:00:00 PriorityTier=10
PartitionName=preemptible Nodes=ALL MaxTime=2-00:00:00 PriorityTier=1 GraceTime=20
"""
"""Memory is watched without control groups; a preempted job gets SIGTERM and GraceTime."""


def missing() -> str:
    """How to install what is missing; empty where all is there."""
    there = all(shutil.which(name, path=SYSTEM) for name in ("slurmctld", "slurmd", "sbatch"))
    return "" if there else f"a virtual Slurm cluster needs `{INSTALL}`"


class VirtualSlurm:
    """A cluster that runs. Its folder holds its configuration, state and logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", "spool", "log", "bin"):
            (folder / name).mkdir(parents=True)
        port, *ports = _free_ports(1 + len(NODES))
        lines = [CONFIGURATION.format(port=port, user=getpass.getuser(), folder=folder)]
        for node, own in zip(NODES, ports, strict=True):
            lines.append(
                f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={own} "
                f"CPUs={CPUS} RealMemory={MEMORY_MB} Gres=gpu:{GPUS}\n"
            )
        # The nodes before the partitions that have them all.
        (folder / "slurm.conf").write_text("".join([*lines[1:], lines[0]]))
        # A GPU must be a character device, whichever.
        gres = [f"NodeName={node} Name=gpu File=/dev/null,/dev/zero\n" for node in NODES]
        (folder / "gres.conf").write_text("".join(gres))
        for name in COMMANDS:
            # Snakemake's jobstep takes SLURM_CONF out of the environment.
            script = folder / "bin" / name
            script.write_text(
                f'#!/bin/sh\nexport SLURM_CONF={folder}/slurm.conf\nexec /usr/bin/{name} "$@"\n'
            )
            script.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        """Under which commands find this cluster, and the processes of its jobs each other."""
        inherited = {key: value for key, value in os.environ.items() if "SLURM_" not in key}
        path = os.pathsep.join([str(self.folder / "bin"), inherited.get("PATH", ""), SYSTEM])
        return {**inherited, "PATH": path, "GLOO_SOCKET_IFNAME": "lo"}

    def start(self) -> None:
        """Start the daemons and wait until all nodes are idle."""
        self._run_daemon("slurmctld", "-c")
        for node in NODES:
            self.start_node(node)
        self.wait_until_idle()

    def start_node(self, node: str) -> None:
        """Start a node's daemon."""
        self._run_daemon("slurmd", "-N", node, key=node)

    def kill_node(self, node: str) -> None:
        """Let a node die, with all that runs on it: no one has time to say a word."""
        self._daemons.pop(node).kill()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cwd() == str(self._place_of(node)) or (
                    process.environ().get("SLURMD_NODENAME") == node
                    and process.environ().get("SLURM_CONF") == f"{self.folder}/slurm.conf"
                ):
                    process.kill()

    def ask(self, *words: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
        return done.stdout.strip()

    def jobs(self, *, running: bool = False) -> list[str]:
        """Ids of the jobs that wait or run."""
        states = "R" if running else "PD,R,CG,S,CF"
        return self.ask("squeue", "-h", "-t", states, "-o", "%A").split()

    def wait_until_idle(self) -> None:
        """Wait until all nodes are free."""
        deadline = time.monotonic() + START_SECONDS
        while self.ask("sinfo", "-h", "-N", "-p", "cpu", "-o", "%t").split() != ["idle"] * 2:
            if time.monotonic() > deadline:
                logs = "\n".join(
                    path.read_text() for path in sorted((self.folder / "log").glob("*.log"))
                )
                raise RuntimeError(f"the virtual cluster is not idle:\n{logs}")
            time.sleep(0.1)

    def clear(self) -> None:
        """End all jobs, and have every node again."""
        for node in NODES:
            if node not in self._daemons:
                self.start_node(node)
        for job in self.jobs():
            self.ask("scancel", "--full", job)
        deadline = time.monotonic() + STOP_SECONDS
        while self.jobs() and time.monotonic() < deadline:
            time.sleep(0.1)
        self.wait_until_idle()

    def stop(self) -> None:
        """End all jobs and the daemons."""
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            for job in self.jobs():
                self.ask("scancel", "--full", job)
            deadline = time.monotonic() + STOP_SECONDS
            while self.jobs() and time.monotonic() < deadline:
                time.sleep(0.1)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def _place_of(self, node: str) -> Path:
        return self.folder / "place" / (node or "controller")

    def _run_daemon(self, name: str, *words: str, key: str = "") -> None:
        self._place_of(key).mkdir(parents=True, exist_ok=True)
        with (self.folder / "log" / f"{key or name}.out").open("ab") as log:
            self._daemons[key or name] = subprocess.Popen(
                [shutil.which(name, path=SYSTEM) or name, "-D", *words],
                env={**os.environ, "SLURM_CONF": f"{self.folder}/slurm.conf", "PATH": SYSTEM},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._place_of(key),  # its job steps' too, by which they are known
                start_new_session=True,  # Ctrl-C is for the tests, which end it in order
            )


@contextlib.contextmanager
def virtual_slurm(folder: Path) -> Iterator[VirtualSlurm]:
    """A cluster in a folder that is not there yet, ended with the block."""
    cluster = VirtualSlurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def main() -> None:
    """Start one for a person, and end it at Ctrl-C."""
    if text := missing():
        sys.exit(text)
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        virtual_slurm(Path(folder) / "cluster") as cluster,
    ):
        print(
            f"export PATH={cluster.folder}/bin:$PATH GLOO_SOCKET_IFNAME=lo\n"
            f"# logs: {cluster.folder}/log; Ctrl-C here ends the cluster",
            flush=True,
        )
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
