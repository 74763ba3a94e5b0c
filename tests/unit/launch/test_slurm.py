"""The batch file, run by a real shell with stand-ins for Slurm's programs and for vlmrl."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from vlmrl.errors import LaunchError
from vlmrl.launch.slurm import SlurmJob, batch_file

SRUN = """#!/bin/bash
# Stands in for srun: one task a node, its own options dropped; the highest exit code of the tasks.
echo "srun $*" >> calls
while [[ $1 == --* ]]; do shift; done
worst=0
for ((node = 0; node < SLURM_NNODES; node++)); do
  SLURM_NODEID=$node "$@" || { code=$?; ((code > worst)) && worst=$code; }
done
exit $worst
"""
SCONTROL = """#!/bin/bash
if [ "$1 $2" = "show hostnames" ]; then printf 'node-a\\nnode-b\\n'; else echo "scontrol $*" >> calls; fi
"""
VLMRL = """#!/bin/bash
# Stands in for vlmrl: a run exists once it was started; the exit code of train is in the file `ends`.
case "$1 $2" in
  "runs show") test -e "run-$3" ;;
  "runs unlock") echo "unlock $3" >> calls ;;
  *) echo "vlmrl $*" >> calls
     while [ $# -gt 0 ]; do [ "$1" = --name ] && touch "run-$2"; shift; done
     exit "$(cat ends)" ;;
esac
"""


@pytest.fixture
def cluster(tmp_path: Path):
    """Run a job's batch file as Slurm would; returns what was called, and the exit code."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "vlmrl": VLMRL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(job: SlurmJob, ends: int) -> tuple[list[str], int]:
        (tmp_path / "ends").write_text(str(ends))
        (tmp_path / "calls").write_text("")
        (tmp_path / "job.sbatch").write_text(batch_file(job, "job.sbatch"))
        env = {
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "node-[a-b]",
            "SLURM_NNODES": str(job.nodes),
        }
        done = subprocess.run(["bash", "job.sbatch"], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.stderr == ""
        return (tmp_path / "calls").read_text().splitlines(), done.returncode

    return run


def job_of(folder: Path, **changes) -> SlurmJob:
    values = {"recipe": Path("recipes/fungi im.toml"), "folder": folder, "command": "train", "nodes": 2, "gpus": 8}
    return SlurmJob(**{**values, **changes})


def test_every_node_starts_a_launcher_that_meets_the_others_on_the_first(cluster, tmp_path: Path) -> None:
    calls, code = cluster(job_of(tmp_path, overrides=["optim.lr=1e-6", 'rollout.stop=["a b"]']), 0)
    assert code == 0
    common = "--gpus 8 --nnodes 2 --rdzv-endpoint node-a:24711"  # 20000 + 4711 % 20000
    start = 'vlmrl train recipes/fungi im.toml --name fungi-im-4711 --set optim.lr=1e-6 --set rollout.stop=["a b"]'
    assert calls[1:] == [f"{start} {common} --node-rank {node}" for node in (0, 1)]


def test_a_run_stopped_before_the_limit_goes_back_into_the_queue_and_is_resumed(cluster, tmp_path: Path) -> None:
    calls, code = cluster(job_of(tmp_path), 130)
    assert code == 130 and calls[-1] == "scontrol requeue 4711"
    calls, code = cluster(job_of(tmp_path), 0)
    assert code == 0 and calls[0] == "unlock fungi-im-4711" and not any("requeue" in call for call in calls)
    assert calls[2].startswith("vlmrl train --resume fungi-im-4711 --gpus 8 --nnodes 2")


def test_a_run_that_failed_is_not_queued_again(cluster, tmp_path: Path) -> None:
    calls, code = cluster(job_of(tmp_path), 2)
    assert code == 2 and not any("requeue" in call for call in calls)


def test_the_directives_say_what_slurm_must_do(tmp_path: Path) -> None:
    job = job_of(tmp_path, time="1-00:00:00", stop_seconds=300, cpus=96, sbatch=["--account=me"], nodes=4)
    lines = batch_file(job, "x.sbatch").splitlines()
    for wanted in (
        "--nodes=4",
        "--gpus-per-node=8",
        "--time=1-00:00:00",
        "--requeue",
        "--open-mode=append",
        "--signal=TERM@300",
        "--cpus-per-task=96",
        "--account=me",
        "--ntasks-per-node=1",
    ):
        assert f"#SBATCH {wanted}" in lines


def test_a_container_sees_the_folder(cluster, tmp_path: Path) -> None:
    calls, _ = cluster(job_of(tmp_path, container="reg/vlmrl:1", cpus=8), 0)
    wanted = f"--container-image=reg/vlmrl:1 --container-mounts={tmp_path}:{tmp_path} --container-workdir={tmp_path}"
    assert wanted in calls[0] and "--cpus-per-task=8" in calls[0]


def test_any_name_and_folder_gives_a_file_that_bash_can_read(tmp_path: Path) -> None:
    job = job_of(Path("/a b/$HOME'; rm"), recipe=Path("'\"$(id).toml"), overrides=["a='b'"], runs=Path("r s"))
    done = subprocess.run(["bash", "-n"], input=batch_file(job, "x"), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("changes", [{"time": "soon"}, {"sbatch": ["account=me"]}, {"sbatch": ["--x\nrm"]}])
def test_mistakes_are_refused(tmp_path: Path, changes) -> None:
    with pytest.raises(LaunchError):
        job_of(tmp_path, **changes)
