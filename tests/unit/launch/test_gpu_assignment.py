"""`--gpus`: which GPUs a run gets, on machines that a fake nvidia-smi describes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.errors import LaunchError
from vlmrl.launch.gpu_assignment import MachineGpu, machine_gpus, place, visible_gpus
from vlmrl.model.gpus import parse_gpus
from vlmrl.store.provenance import usable_threads

GPUS = [MachineGpu(n, f"GPU-{n}abc", 10) for n in range(4)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put an nvidia-smi on the path that says these GPUs have so many MiB in use; no GPU variables are set."""

    def make(*used: int | str) -> None:
        lines = "".join(f"{n}, GPU-{n}abc, {mib}\\n" for n, mib in enumerate(used))
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        monkeypatch.delenv(name, raising=False)
    return make


def test_a_number_takes_the_first_free_gpus(machine) -> None:
    machine(10, 60_000, 0, "[N/A]")
    assert place("2").devices == "0,2"
    assert place("3").devices == "0,2,3"
    assert place("3").env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_list_takes_these_gpus_in_this_order(machine) -> None:
    machine(10, 10, 10)
    assert place("2,0").devices == "2,0" and place("2,0").ranks == 2
    assert place("1,").devices == "1"


def test_busy_gpus_are_refused_with_what_is_free(machine) -> None:
    machine(10, 60_000, 10)
    with pytest.raises(LaunchError, match=r"in use by other processes: GPU 1 \(60000 MiB\)") as found:
        place("0,1")
    assert "0 free, 1 in use (60000 MiB), 2 free" in (found.value.hint or "")
    with pytest.raises(LaunchError, match=r"--gpus 3: 2 of 3 GPUs free"):
        place("3")


def test_too_many_or_unknown_gpus_are_refused(machine) -> None:
    machine(10, 10)
    with pytest.raises(LaunchError, match=r"--gpus 3: this process sees 2 GPUs"):
        place("3")
    with pytest.raises(LaunchError, match="there is no GPU 5"):
        place("0,5")


def test_numbers_count_the_visible_gpus(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(*[10] * 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert place("2").devices == "4,5"
    assert place("0,3").devices == "4,7"
    with pytest.raises(LaunchError, match="sees 4 GPU"):
        place("5")


def test_what_slurm_gave_holds_where_nobody_set_the_visible_gpus(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(*[10] * 4)
    monkeypatch.setenv("SLURM_JOB_GPUS", "2,3")
    assert place("2").devices == "2,3"
    monkeypatch.setenv("SLURM_STEP_GPUS", "3")
    assert place("1").devices == "3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert place("1").devices == "0"


def test_without_a_gpu_processes_run_on_the_cpu_and_share_its_cores(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    placement = place("3")
    assert placement.devices is None and placement.ranks == 3
    assert placement.threads == max(1, usable_threads() // 3)
    assert placement.env == {"OMP_NUM_THREADS": str(placement.threads)}
    with pytest.raises(LaunchError, match="this machine has no GPU") as found:
        place("0,2,5")
    assert "--gpus 3" in (found.value.hint or "")


def test_no_nvidia_smi_means_no_gpu(machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine_gpus() == []


@pytest.mark.parametrize(("listed", "expected"), [
    ("2,0", [2, 0]), ("", []), ("-1", []), ("1,9,2", [1]), ("GPU-3a,0", [3, 0]), ("GPU-", []), (" 1 , 2 ", [1, 2]),
])  # fmt: skip
def test_visible_devices_are_read_as_cuda_reads_them(listed: str, expected: list[int]) -> None:
    found = visible_gpus(GPUS, {"CUDA_VISIBLE_DEVICES": listed})
    assert [c.index for c in found] == expected


def test_slices_of_a_gpu_keep_their_names() -> None:
    found = visible_gpus(GPUS, {"CUDA_VISIBLE_DEVICES": "MIG-one,MIG-two"})
    assert [c.name for c in found] == ["MIG-one", "MIG-two"]


@pytest.mark.parametrize("asked", ["", "two", "-1", "0", "1,x", "1,1", ",", "1.5"])
def test_what_is_neither_a_number_nor_a_list_is_refused(asked: str) -> None:
    with pytest.raises(LaunchError):
        parse_gpus(asked)


@given(st.lists(st.integers(0, 99), min_size=1, unique=True))
def test_any_list_of_different_numbers_is_read_back(numbers: list[int]) -> None:
    assert parse_gpus(",".join(map(str, numbers)) + ",") == (0, tuple(numbers))


def test_processes_that_share_engines_come_in_whole_groups(machine) -> None:
    machine(10, 10, 10, 10)
    assert place("4", parts=2).ranks == 4 and place("4", parts=4).ranks == 4
    with pytest.raises(LaunchError, match=r"3 is not a multiple of rollout.tensor_parallel = 2") as refused:
        place("3", parts=2)
    assert "give --gpus 4" in (refused.value.hint or "")
    # Engines on GPUs of their own ask nothing of those that train.
    assert (place("4", engines=2, parts=2).ranks, place("3", engines=2, parts=2).ranks) == (2, 1)
