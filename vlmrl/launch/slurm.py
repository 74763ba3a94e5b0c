"""Batch file for Slurm: one launcher per node, rendezvous on the first node, stop before the time limit, requeue.

The file needs no other script, so users can read and change everything that it does.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmrl.errors import LaunchError

TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d+(:\d{1,2}){0,2}")
"""Slurm's time formats: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on."""
WAIT_SECONDS = 60
"""Seconds from the end of the first launcher until srun ends the others: a lost node does not report that its launcher
has ended."""

TEMPLATE = """\
#!/bin/bash
{directives}

# Written by `vlmrl launch slurm`. Submit it with: sbatch {file}
# {stop_seconds} s before the time limit Slurm sends SIGTERM to the launchers. They finish the step and save a
# checkpoint, and the job goes back into the queue. When it starts again it resumes the same run.
set -uo pipefail
cd {folder} || exit 2
run={name}-$SLURM_JOB_ID
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))

if vlmrl runs show "$run"{runs} > /dev/null 2>&1; then
  # Slurm runs a job once at a time: the process that locked this run has ended, whichever node it ran on.
  vlmrl runs unlock "$run"{runs}
  what=(--resume "$run")
else
  what=({recipe} --name "$run"{options})
fi

code=0
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait={wait} {container}\\
  bash -c 'exec vlmrl {command} "$@" --node-rank "$SLURM_NODEID"' vlmrl \\
  "${{what[@]}}"{runs} --gpus {gpus} --nnodes {nodes} --rdzv-endpoint "$first:$port" || code=$?

if [ "$code" = 130 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(frozen=True)
class SlurmJob:
    """Contents of the batch file.

    Args:
        recipe: recipe file, absolute or relative to `folder`.
        folder: working directory of the job.
        command: `train` or `sft`.
        nodes, gpus: number of machines, and of GPUs on each machine.
        time: Slurm's time limit, such as 24:00:00; None = the partition's limit.
        stop_seconds: number of seconds before that limit at which the run is saved and stopped.
        cpus: CPU cores per node; None = Slurm's choice.
        container: image for Slurm's container plugin (pyxis); None = no container.
        sbatch: additional #SBATCH directives, such as `--account=me`.
        overrides: `--set` values.
        runs: folder of the runs; None = the default.
    Raises: LaunchError for a time or a directive that Slurm cannot parse.
    """

    recipe: Path
    folder: Path
    command: str
    nodes: int
    gpus: int
    time: str | None = None
    stop_seconds: int = 600
    cpus: int | None = None
    container: str | None = None
    sbatch: Sequence[str] = ()
    overrides: Sequence[str] = ()
    runs: Path | None = None

    def __post_init__(self) -> None:
        if self.time is not None and not TIME.fullmatch(self.time):
            raise LaunchError(f"--time cannot be `{self.time}`", hint="hours:minutes:seconds, or days-hours")
        for words in self.sbatch:
            if not words.startswith("-") or "\n" in words:
                raise LaunchError(f"--sbatch cannot be `{words}`", hint="such as --sbatch=--account=me")


def batch_file(job: SlurmJob, file: str) -> str:
    """Return the text of the batch file. `file`: its name, for the comment with the command that submits it."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", job.recipe.stem).strip("-.") or "run"
    directives = [
        f"--job-name=vlmrl-{name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--gpus-per-node={job.gpus}",
        *([f"--cpus-per-task={job.cpus}"] if job.cpus else []),
        *([f"--time={job.time}"] if job.time else []),
        "--requeue",
        "--open-mode=append",
        f"--signal=TERM@{job.stop_seconds}",
        f"--output=slurm-{name}-%j.log",
        *job.sbatch,
    ]
    here = shlex.quote(str(job.folder))
    container = ""
    if job.container is not None:
        image = shlex.quote(job.container)
        container = f"--container-image={image} --container-mounts={here}:{here} --container-workdir={here} "
    if job.cpus:
        container = f"--cpus-per-task={job.cpus} {container}"
    return TEMPLATE.format(
        directives="\n".join(f"#SBATCH {d}" for d in directives),
        file=file,
        stop_seconds=job.stop_seconds,
        folder=here,
        name=name,
        recipe=shlex.quote(str(job.recipe)),
        container=container,
        command=job.command,
        options="".join(f" --set {shlex.quote(o)}" for o in job.overrides),
        gpus=job.gpus,
        nodes=job.nodes,
        runs="" if job.runs is None else f" --runs {shlex.quote(str(job.runs))}",
        wait=WAIT_SECONDS,
    )
