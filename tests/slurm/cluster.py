"""A real Slurm on this machine, for tests: munged, slurmctld and three slurmds, no systemd, all state in one folder.

Each slurmd runs in its own host-name and mount namespace as `node1`, `node2` or `node3`. These names resolve to
different addresses, so scripts find their head node as on a real cluster. Eight more nodes, `paper1` to `paper8`, exist
only for the scheduler (powered down, as in a cloud), to check whether a job fits them.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

NODES = 3
LENIENT = "--threshold disk=0 --threshold clock=1e6 --threshold cpu_product=0 --threshold cpu_pair=0"
"""Options of the doctor with which a busy machine judges no node by its speed."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
ENDED = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL"}


def search_path() -> str:
    return os.environ["PATH"] + ":/usr/sbin:/sbin"


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if not shutil.which(program, path=search_path())]


class Cluster:
    """Start it with `with Cluster() as slurm`; everything it started is gone afterwards."""

    def __init__(self) -> None:
        # A short path: sockets' names are limited to 108 bytes. Searchable by others: munged insists.
        self.root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.root.chmod(0o755)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH_", "SRUN_", "CUDA_VISIBLE"))}
        self.env = clean | {"SLURM_CONF": str(self.root / "slurm.conf"), "PATH": search_path(), "OMP_NUM_THREADS": "1"}
        self.env["PREFLIGHT"] = "nodes"  # what two ranks on one busy machine measure says nothing
        self.env["DOCTOR_OPTIONS"] = LENIENT
        self.daemons: dict[str, subprocess.Popen] = {}
        # Sweeps up once its input closes: here at the end, or when this process dies, however it dies.
        sweep = [sys.executable, __file__, str(self.root)]
        self.sweeper = subprocess.Popen(sweep, stdin=subprocess.PIPE, env=clean, start_new_session=True)
        self.namespaces = _can_unshare()

    def __enter__(self) -> "Cluster":
        try:
            self._configure()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.sweeper.communicate()  # closes its input
        for daemon in self.daemons.values():
            daemon.wait()

    # What tests do with it

    def run(self, *command: str | Path, check: bool = True, **options) -> subprocess.CompletedProcess:
        """Run a command as a user of this cluster."""
        options = {"env": self.env, "timeout": 900} | options
        done = subprocess.run([str(part) for part in command], text=True, capture_output=True, **options)
        assert not check or done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def submit(self, *arguments: str | Path, cwd: Path, **env: str) -> str:
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd, env=self.env | env).stdout.strip()

    def show(self, job: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`; for an array, of its first task."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", "--oneliner", job).stdout))

    def wait(
        self, job: str, log: Path, until: Callable[[dict[str, str]], bool] | None = None, timeout: float = 900
    ) -> dict[str, str]:
        """Poll the job until it has ended, or `until` is true of it; where that cannot be, fail with all the logs."""
        deadline = time.monotonic() + timeout
        while True:
            shown = self.show(job)
            ended = shown["JobState"] in ENDED
            if until(shown) if until else ended:
                return shown
            if ended or time.monotonic() > deadline:
                text = log.read_text(errors="replace") if log.exists() else ""
                raise AssertionError(f"waited in vain for job {job}: {shown}\n{text}\n{self.logs()}")
            time.sleep(0.1)

    def cancel_all(self) -> None:
        """Cancel what is left and wait until the nodes are free."""
        jobs = self.run("squeue", "--noheader", "--format=%A").stdout.split()
        if jobs:
            self.run("scancel", "--full", "--signal=KILL", *set(jobs), check=False)
            self.run("scancel", *set(jobs), check=False)
        deadline = time.monotonic() + 300
        while self.run("squeue", "--noheader").stdout and time.monotonic() < deadline:
            time.sleep(0.1)

    @contextlib.contextmanager
    def cramped(self, node: str) -> Iterator[None]:
        """Give the node 1 MiB of shared memory, as a container started without --shm-size has too little of it."""
        enter = ["nsenter", "--mount", f"--target={self.daemons[node].pid}"]
        self.run(*enter, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm")
        try:
            yield
        finally:
            self.run(*enter, "umount", "/dev/shm")

    def set_node(self, node: str, state: str) -> None:
        self.run("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=test")

    def kill_node(self, node: str) -> int:
        """Kill every process of a node, its slurmd included, as a power cut would; return how many there were."""
        namespace = os.readlink(f"/proc/{self.daemons[node].pid}/ns/uts")
        killed = 0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/uts") == namespace:
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
        return killed

    def processes(self, **env: str) -> list[int]:
        """Processes of this cluster, daemons and jobs, that have these variables in their environment."""
        return _processes({"SLURM_CONF": self.env["SLURM_CONF"], **env})

    def logs(self) -> str:
        def tail(log: Path) -> str:
            return "\n".join(log.read_text(errors="replace").splitlines()[-25:])

        return "\n".join(f"== {log.name}\n{tail(log)}" for log in self._logs())

    # How it comes up

    def _configure(self) -> None:
        for folder in ("munge", "state", "log", "spool", "dev"):
            (self.root / folder).mkdir()
        (self.root / "munge/key").write_bytes(os.urandom(1024))
        (self.root / "munge/key").chmod(0o400)
        hosts = Path("/etc/hosts").read_text() + "".join(f"\n127.0.0.{10 + i} node{i}" for i in range(1, NODES + 1))
        (self.root / "hosts").write_text(hosts + "\n")
        host = socket.gethostname().split(".")[0]
        if self.namespaces:
            address = f"NodeAddr=127.0.0.[11-{10 + NODES}]"
        else:
            address = f"NodeHostname={host} NodeAddr=127.0.0.1"
        port = _free_ports(NODES + 1)
        settings = CONFIG.format(
            root=self.root,
            host=host,
            user=self.run("id", "-un").stdout.strip(),
            plugins=_plugin_folder(),
            address=address,
            nodes=NODES,
            port=port,
            first=port + 1,
            last=port + NODES,
        )
        (self.root / "slurm.conf").write_text(settings)
        (self.root / "gres.conf").write_text(
            f"AutoDetect=off\nNodeName=node[1-{NODES}],paper[1-8] Name=gpu Type=h100 File={self._fake_gpus()}\n"
        )

    def _fake_gpus(self) -> str:
        """GPUs must be character devices: root makes clones of /dev/null, another user lends the terminals."""
        try:
            for i in range(8):
                os.mknod(self.root / f"dev/gpu{i}", 0o020666, os.makedev(1, 3))
        except PermissionError:
            return "/dev/tty[0-7]"
        return f"{self.root}/dev/gpu[0-7]"

    def _start(self) -> None:
        munge = self.root / "munge"
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={munge / name}" for option, name in files.items()]
        self._daemon("munged", "munged", "--foreground", "--force", "--num-threads=2", *options)
        self._poll(lambda: (munge / "socket").exists(), "munged does not answer", 300)
        self._daemon("slurmctld", "slurmctld", "-D", "-i")
        for i in range(1, NODES + 1):
            name = f"node{i}"
            (self.root / "spool" / name).mkdir()
            slurmd = ["slurmd", "-D", "-N", name]
            if self.namespaces:
                enter = f"hostname {name} && mount --bind {self.root}/hosts /etc/hosts && exec {' '.join(slurmd)}"
                slurmd = ["unshare", *NAMESPACES, "bash", "-c", enter]
            self._daemon(name, *slurmd)
        idle = ("sinfo", "--noheader", "--partition=batch", "--states=idle", "--format=%D")
        self._poll(lambda: self.run(*idle, check=False).stdout.strip() == str(NODES), "the nodes are not idle", 300)

    def _daemon(self, name: str, *command: str) -> None:
        with open(self.root / f"log/{name}.out", "ab") as out:
            self.daemons[name] = subprocess.Popen(
                command, env=self.env, cwd="/", stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def _poll(self, ready: Callable[[], bool], otherwise: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not ready():
            dead = [name for name, daemon in self.daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                raise RuntimeError(f"{otherwise}; ended early: {dead or 'none'}\n{self.logs()}")
            time.sleep(0.05)

    def _logs(self) -> list[Path]:
        return sorted(log for log in (self.root / "log").glob("*") if log.is_file())


def _processes(env: dict[str, str]) -> list[int]:
    wanted = {f"{name}={value}".encode() for name, value in env.items()}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted <= set((process / "environ").read_bytes().split(b"\0")):
                found.append(int(process.name))
    return found


def _sweep(root: Path) -> None:
    """Kill everything that runs under this cluster's configuration, and forget its state."""
    for _ in range(20):
        left = _processes({"SLURM_CONF": str(root / "slurm.conf")})
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            break
        time.sleep(0.1)
    shutil.rmtree(root, ignore_errors=True)


NAMESPACES = ["--mount", "--uts"] if os.geteuid() == 0 else ["--map-current-user", "--keep-caps", "--mount", "--uts"]


def _can_unshare() -> bool:
    attempt = ["unshare", *NAMESPACES, "bash", "-c", "hostname x && mount --bind /etc/hosts /etc/hosts"]
    return subprocess.run(attempt, capture_output=True).returncode == 0


def _plugin_folder() -> str:
    return str(next(Path("/usr/lib").glob("*/slurm-wlm"), Path("/usr/lib/slurm")))


def _free_ports(count: int) -> int:
    """The first of `count` neighbouring ports that nobody listens on, away from where jobs put their MASTER_PORT."""
    for _ in range(100):
        base = random.SystemRandom().randrange(30_000, 32_700)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(base, base + count):
                stack.enter_context(socket.socket()).bind(("", port))
            return base
    raise RuntimeError(f"no {count} free ports in a row between 30000 and 32700")


# As a production cluster, with every wait cut short and without what needs root, systemd or a database.
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
PluginDir={plugins}
PlugStackConfig=/dev/null
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits before it may start again
AuthInfo=socket={root}/munge/socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
LogTimeFormat=iso8601_ms
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000,batch_sched_delay=0
DefMemPerCPU=100
JobRequeue=1
EnforcePartLimits=ALL
ReturnToService=2
SlurmdParameters=config_overrides
OverTimeLimit=0
KillWait=30
MessageTimeout=10
MinJobAge=600
CompleteWait=0
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout=60
TCPTimeout=2
SuspendTime=86400
SuspendProgram=/bin/true
ResumeProgram=/bin/true
GresTypes=gpu
NodeName=node[1-{nodes}] {address} Port=[{first}-{last}] CPUs=8 RealMemory=16000 Gres=gpu:h100:8 State=UNKNOWN
NodeName=paper[1-8] NodeAddr=127.0.0.1 Port=1 CPUs=128 RealMemory=1000000 Gres=gpu:h100:8 State=CLOUD
PartitionName=batch Nodes=node[1-{nodes}] Default=YES MaxTime=INFINITE DefaultTime=10
PartitionName=gpu Nodes=paper[1-8] MaxTime=INFINITE
"""

if __name__ == "__main__":
    sys.stdin.read()
    _sweep(Path(sys.argv[1]))
