"""Start of a run's ranks with torchrun's agent: one process per rank, all with the same command."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from vlmrl.dist.world import FOLDER_VARIABLE, HALVED_VARIABLE, MEETING_VARIABLE, PARENT_VARIABLE, TYPED_FILE
from vlmrl.errors import LaunchError
from vlmrl.launch.rank_watch import Ending, Watch
from vlmrl.process import patience

JOIN_SECONDS = 900
"""Time limit in seconds until all machines have joined the rendezvous."""


@dataclass(frozen=True)
class Job:
    """Processes to start on this machine.

    Args:
        command: arguments of the Python interpreter of each rank.
        ranks: number of processes on this machine.
        nnodes, node_rank: count of machines, and index of this one, from 0 (machine 0 hosts the rendezvous).
        endpoint: `host:port` of the rendezvous of all machines; None for one machine.
        job_id: name of the rendezvous: the same on all machines of a job, so that other jobs' machines do not join it.
        env: environment of the ranks, in addition to this process's.
        timeout_seconds: time limit in seconds of one phase of a rank.
        argv: command line as the user typed it, for the record of the run; () = record the rank's own command line.
    """

    command: tuple[str, ...]
    ranks: int
    nnodes: int = 1
    node_rank: int = 0
    endpoint: str | None = None
    job_id: str = "vlmrl"
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: float = 1800.0
    argv: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.nnodes > 1 and not self.endpoint:
            raise LaunchError("--nnodes needs --rdzv-endpoint", hint="--rdzv-endpoint HOST:PORT, the same on all nodes")
        if not 0 <= self.node_rank < self.nnodes:
            raise LaunchError(
                f"--node-rank {self.node_rank} does not exist: there are {self.nnodes} nodes",
                hint="nodes are numbered from 0",
            )


def torchrun_line(job: Job) -> str:
    """Return the torchrun command that starts the same ranks without vlmrl's launcher."""
    words = [f"{k}={shlex.quote(v)}" for k, v in job.env.items()] + ["torchrun"]
    if job.nnodes == 1:
        words.append("--standalone")
    else:
        words += [
            f"--nnodes={job.nnodes}",
            f"--node-rank={job.node_rank}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={job.endpoint}",
            f"--rdzv-id={job.job_id}",
        ]
    return " ".join([*words, f"--nproc-per-node={job.ranks}", shlex.join(job.command)])


def launch_twice(job: Job, again: Callable[[Path], Job], say: Callable[[str], None]) -> tuple[Ending, Path | None]:
    """Run `launch`; if a rank ran out of memory, start all ranks once more on the same run with half the token budget.

    All ranks are started again, because the others cannot wait until one rank has resumed. On several machines there is
    no second start: each machine has its own launcher, and the launchers do not communicate.

    Args:
        again: function that takes the run's folder and returns a job that resumes the run.
        say: function that prints a line about the second start.
    """
    ending, run_dir = launch(job)
    if not ending.halved or run_dir is None or job.nnodes > 1:
        return ending, run_dir
    budgets = ", ".join(f"{key} = {now} (was {before})" for key, (before, now) in ending.halved.items())
    say(f"{ending.message}\nstarting all processes once more, with {budgets}")
    env = {**job.env, HALVED_VARIABLE: json.dumps(dict(ending.halved))}
    return launch(replace(again(run_dir), env=env))


def launch(job: Job) -> tuple[Ending, Path | None]:
    """Run the job to its end.

    No rank keeps running: a rank that dies or hangs ends the others (launch/rank_watch.py), and the kernel ends all of
    them when this process is killed.

    Returns: (how the job ended, folder of the run; None if no rank has named a folder).
    Raises: LaunchError if the machines do not find each other.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import launch_agent

    # Otherwise the agent would print its own report of a failure before vlmrl's error.
    logging.disable(logging.ERROR)
    folder = Path(tempfile.mkdtemp(prefix="vlmrl-launch-"))
    remover = _remover(folder)
    variables = {FOLDER_VARIABLE: str(folder), PARENT_VARIABLE: str(os.getpid())}
    if job.nnodes == 1:
        variables[MEETING_VARIABLE] = str(folder / "ranks")
    os.environ.update({**job.env, **variables})
    if job.argv:  # in a file that only this user can read: it may be long and contain a secret
        (folder / TYPED_FILE).write_text(json.dumps(job.argv), encoding="utf-8")
    watch = Watch(folder, patience(job.timeout_seconds))
    exit_codes: dict[int, int] = {}
    try:
        with watch.catching_signals():
            watch.start()
            try:
                launch_agent(_config(job, folder), sys.executable, list(job.command))
            except ChildFailedError as error:
                exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            except RendezvousError as error:
                where = job.endpoint or "this machine"
                raise LaunchError(f"the nodes did not connect at {where}: {error}", hint="does node 0 run?") from error
            finally:
                watch.stop()
        return watch.ending(exit_codes), watch.run_dir
    finally:
        logging.disable(logging.NOTSET)
        for name in (FOLDER_VARIABLE, PARENT_VARIABLE, HALVED_VARIABLE, MEETING_VARIABLE):
            os.environ.pop(name, None)
        shutil.rmtree(folder, ignore_errors=True)
        remover.communicate()


def _remover(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that removes the folder a second after this process has ended, however it ends."""
    script = 'read -r _; [ -d "$1" ] || exit 0; sleep 1; exec rm -rf -- "$1"'
    return subprocess.Popen(["/bin/sh", "-c", script, "sh", str(folder)], stdin=subprocess.PIPE, start_new_session=True)


def _config(job: Job, folder: Path):
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from vlmrl.dist.meeting import BACKEND

    one_machine = job.nnodes == 1
    rendezvous = {"timeout": JOIN_SECONDS, "read_timeout": JOIN_SECONDS, "is_host": str(job.node_rank == 0)}
    return LaunchConfig(
        min_nodes=job.nnodes,
        max_nodes=job.nnodes,
        nproc_per_node=job.ranks,
        max_restarts=0,
        role="rank",
        run_id=uuid.uuid4().hex if one_machine else job.job_id,
        rdzv_backend=BACKEND if one_machine else "c10d",
        rdzv_endpoint=str(folder / "agent") if one_machine else job.endpoint or "",
        rdzv_configs=rendezvous,
        local_addr="127.0.0.1" if one_machine else None,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        # vlmrl's handler forwards SIGINT and SIGTERM, so that ranks finish their step; the agent's would kill them.
        signals_to_handle="SIGQUIT",
    )
