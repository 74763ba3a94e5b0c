"""GPUs that are assigned and that torch does not see: an error with the reason, and never a run on the CPU instead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from command_line import settings, this_process
from small_runs import TWO_STEPS, make_place

from vlmrl.errors import LaunchError
from vlmrl.model.gpus import assigned_gpus, machine_gpus, missing_gpus
from vlmrl.model.load import pick_device
from vlmrl.model.model_facts import device_facts

VARIABLES = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    missing_gpus.cache_clear()
    yield
    missing_gpus.cache_clear()


def install_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    smi = folder / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{body}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_without_gpus_a_run_is_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert assigned_gpus(os.environ) == "" and missing_gpus() is None
    assert pick_device("auto").type == "cpu" and device_facts("auto")[1] == []


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "CUDA_VISIBLE_DEVICES=0,1"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a"}, "CUDA_VISIBLE_DEVICES=GPU-1a"),
        ({"SLURM_JOB_GPUS": "3"}, "SLURM_JOB_GPUS=3"),
        ({}, "nvidia-smi lists 2"),
        ({"CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "-1,0"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "", "SLURM_JOB_GPUS": "3"}, ""),
    ],
)
def test_what_says_that_there_are_gpus(tmp_path, monkeypatch, variables, said):
    install_smi(tmp_path, monkeypatch, "printf '0, GPU-0a, 10\\n1, GPU-1a, 10\\n'")
    assert assigned_gpus(variables) == said


def test_the_error_says_why_and_what_to_do(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    old = "The NVIDIA driver on your system is too old (found version 11040)."

    def refuse() -> None:
        raise RuntimeError(f"{old}\nPlease update")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(LaunchError) as caught:
        pick_device("auto")
    assert "CUDA_VISIBLE_DEVICES=0" in caught.value.message and old in caught.value.message
    assert "CUDA 13.0 needs driver 580" in caught.value.hint and "model.device=cpu" in caught.value.hint
    assert pick_device("cpu").type == "cpu"
    with pytest.raises(LaunchError):
        pick_device("cuda")
    facts, [(what, hint)] = device_facts("auto")
    assert facts["kind"] == "cpu" and old in what and "580" in hint and device_facts("cpu")[1] == []


def test_a_torch_without_cuda_is_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.version, "cuda", None)
    found = missing_gpus()
    assert found is not None and "built without CUDA" in found[0] and "install a torch with CUDA" in found[1]


@pytest.mark.parametrize(
    ("body", "gpus"),
    [
        ("echo 'No devices were found'; exit 6", 0),
        ("echo 'could not communicate with the NVIDIA driver'; exit 9", 0),
        ("printf '0, GPU-0a, 10\\n'", 1),
    ],
)
def test_a_machine_without_a_driver_has_no_gpus(tmp_path, monkeypatch, body, gpus):
    install_smi(tmp_path, monkeypatch, body)
    assert len(machine_gpus()) == gpus


def test_a_driver_that_is_not_its_librarys_is_an_error(tmp_path, monkeypatch):
    told = "Failed to initialize NVML: Driver/library version mismatch"
    install_smi(tmp_path, monkeypatch, f"echo '{told}'; exit 18")
    with pytest.raises(LaunchError, match="mismatch") as caught:
        missing_gpus()
    assert "reboot" in caught.value.hint


@pytest.mark.slow
def test_no_command_runs_on_the_cpu_in_silence(tmp_path, tiny_folder, monkeypatch):
    place = make_place(tmp_path, tiny_folder, TWO_STEPS)
    recipe = place / "rl.toml"
    recipe.write_text(recipe.read_text().replace('model.device = "cpu"\n', ""))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for words in (
        ("check", recipe),
        ("train", recipe),
        ("try", recipe),
        ("sft", recipe, *settings("kind=sft")),
        ("eval", tiny_folder, "--recipe", recipe),
    ):
        done = this_process(*words, cwd=place)
        assert done.code == 2, (words, done.err)
        assert "this process has GPUs (CUDA_VISIBLE_DEVICES=0,1)" in done.out + done.err, words
        assert "model.device=cpu" in done.out + done.err and "Traceback" not in done.err
    assert not list(place.glob("runs/*/metrics.jsonl"))
    on_cpu = settings("model.device=cpu", "rollout.max_new_tokens=80")
    for command in ("check", "train"):
        done = this_process(command, recipe, *on_cpu, cwd=place)
        assert done.code == 0 and "this process has GPUs" not in done.out + done.err, done.err
