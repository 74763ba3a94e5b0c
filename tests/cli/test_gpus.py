"""`--gpus` and its companions on the command line: what is printed, what is refused, what each rank would run."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from command_line import own_process, settings, this_process
from small_runs import copy_digits

from vlmrl.dist.world import OPEN_PORTS
from vlmrl.errors import LaunchError
from vlmrl.launch.request import EvalRequest, GenerateRequest, Machines, TrainRequest
from vlmrl.launch.start import describe_other_processes
from vlmrl.store.runs import create_run, resume_run

SHORT = settings(
    "train.steps=1",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
    "rollout.max_new_tokens=8",
    "eval.every_steps=0",
    "eval.max_rows=2",
    "model.dtype=float32",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    """A folder with digits, and a recipe for the tiny model."""
    folder = tmp_path_factory.mktemp("gpus")
    copy_digits(folder / "data")
    (folder / "tiny.toml").write_text(
        f'[model]\npath = "{tiny_folder}"\ndevice = "cpu"\n[[data]]\npath = "data"\ntask = "digits"\n'
    )
    return folder


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_dry_run_prints_the_plain_torchrun_line_and_starts_nothing(place: Path) -> None:
    done = this_process("train", "tiny.toml", "--gpus", "2", "--set", "optim.lr=1e-5", "--dry-run", cwd=place)
    assert done.code == 0, done.err
    words = shlex.split(done.out)
    assert words[0].startswith("OMP_NUM_THREADS=")
    assert words[1:] == [
        "torchrun",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "vlmrl",
        "train",
        "tiny.toml",
        "--set",
        "optim.lr=1e-5",
    ]
    assert not (place / "runs").exists()


def test_a_dry_run_of_several_machines_names_the_meeting_point(place: Path) -> None:
    done = this_process(
        "train",
        "tiny.toml",
        "--gpus=4",
        "--nnodes=2",
        "--node-rank",
        "1",
        "--rdzv-endpoint",
        "first:29400",
        "--dry-run",
        "--json",
        cwd=place,
    )
    line = done.json["command"]
    assert "--nnodes=2 --node-rank=1 --rdzv-backend=c10d --rdzv-endpoint=first:29400" in line
    assert line.endswith("--nproc-per-node=4 -m vlmrl train tiny.toml --json")


def test_a_dry_run_tells_what_is_wrong_with_the_recipe_first(place: Path) -> None:
    done = this_process("train", "tiny.toml", "--gpus", "2", "--set", "optim.lt=1e-5", "--dry-run", cwd=place)
    assert done.code == 2 and "lt" in done.err and done.out == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "two"], "--gpus cannot be `two`"),
        (["--gpus", "0,1"], "this machine has no GPU"),
        (["--gpus", "2", "--nnodes", "2"], "--nnodes needs --rdzv-endpoint"),
        (
            ["--gpus", "2", "--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "a:1"],
            "--node-rank 2 does not exist",
        ),
    ],
)
def test_mistakes_are_told_before_anything_starts(place: Path, words: list[str], said: str) -> None:
    done = this_process("train", "tiny.toml", *words, cwd=place)
    assert done.code == 2 and said in done.err and "Traceback" not in done.err
    assert not (place / "runs").exists()


def asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *words: str) -> Any:
    """The request that a command line makes, and the exit code with which the command was then stopped."""
    requests: list[Any] = []

    def stop(request: Any, *others: Any) -> None:
        requests.append(request)
        raise LaunchError("stopped here")

    monkeypatch.setattr("vlmrl.launch.start.prepare", stop)
    monkeypatch.setattr("vlmrl.launch.start.evaluate_on_ranks", lambda gpus, request, *others: stop(request))
    this_process(*words, cwd=tmp_path)
    (request,) = requests
    return request


def test_every_rank_runs_the_command_without_the_launchers_options(monkeypatch, tmp_path) -> None:
    typed = "train r.toml --gpus 2 --set a=1 --nnodes=2 --node-rank 1 --rdzv-endpoint h:1 --dry-run --name x --gpus=3"
    request = asked_for(monkeypatch, tmp_path, *typed.split())
    assert request.rank_words() == ["train", "r.toml", "--set", "a=1", "--name", "x"]
    assert request.machines == Machines("3", 2, 1, "h:1") and request.dry_run
    assert list(request.argv) == typed.split()


@pytest.mark.parametrize("command", ["train", "sft"])
def test_the_command_of_a_rank_gives_the_same_request_again(monkeypatch, tmp_path, command: str) -> None:
    """All options that are not the launcher's: a rank parses the words that its launcher built, and lacks none."""
    request = TrainRequest(
        "rl" if command == "train" else "sft",
        Path("-r.toml"),
        ("a=1", "b='x y'"),
        None,
        "one@3",
        False,
        "-x",
        ("t", "u"),
        "n m",
        Path("some where"),
        Machines("2", debug_rank=None),
        True,
        True,
    )
    words = request.rank_words()
    again = asked_for(monkeypatch, tmp_path, *words)
    assert again == replace(request, machines=Machines(), argv=tuple(words))
    resumed = TrainRequest(request.kind, None, (), "two", accept_changes=True)
    words = resumed.rank_words()
    assert asked_for(monkeypatch, tmp_path, *words) == replace(resumed, argv=tuple(words))


def test_no_field_of_a_request_is_forgotten_in_the_command_of_a_rank() -> None:
    """Each field, changed alone, changes the words; those of the launcher and the record do not."""
    for plain, left_out in (
        (TrainRequest("rl"), {"machines", "dry_run", "argv"}),
        (EvalRequest(model="m"), {"gpus", "argv"}),
        (GenerateRequest(model="m", out=Path("a.jsonl")), {"gpus", "argv"}),
    ):
        for field in fields(plain):
            value = getattr(plain, field.name)
            other = {bool: not value, tuple: ("x",), int: 7, str: "sft" if field.name == "kind" else "x"}
            changed = replace(plain, **{field.name: other.get(type(value), "x")})
            assert (changed.rank_words() == plain.rank_words()) == (field.name in left_out), field.name


def test_the_second_start_keeps_what_is_printed() -> None:
    request = TrainRequest("rl", Path("r.toml"), name="x", machines=Machines("2"), quiet=True, as_json=True)
    assert request.resume_words("id", Path("runs")) == [
        "train",
        "--resume",
        "id",
        "--runs",
        "runs",
        "--quiet",
        "--json",
    ]


@pytest.mark.parametrize(("before", "now", "told"), [(2, 1, "1 process, the one before had 2; --gpus 2"), (1, 1, "")])
def test_a_resume_with_another_number_of_processes_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: int,
    now: int,
    told: str,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(before))
    create_run(tmp_path, kind="rl", recipe_name="r", name="one").finish("interrupted")
    monkeypatch.setenv("WORLD_SIZE", str(now))
    with resume_run(tmp_path, "one") as run:
        said = describe_other_processes(run)
    assert told in said and bool(said) == bool(told)


@pytest.mark.slow
def test_one_gpu_trains_in_this_process(place: Path) -> None:
    warned = ("--set", "algo.kl_horizon=100")  # without a target it does nothing
    done = own_process("train", "tiny.toml", "--gpus", "1", "--json", "--runs", "alone", *warned, *SHORT, cwd=place)
    assert done.json["status"] == "done"
    assert done.err.count("warning: `algo.kl_horizon` does nothing") == done.err.count("warning: ") == 1, done.err


def test_a_batch_file_is_written_for_a_recipe_that_holds(place: Path) -> None:
    done = this_process(
        "launch",
        "slurm",
        "tiny.toml",
        "--nodes",
        "4",
        "--gpus",
        "8",
        "--set",
        "train.steps=2",
        "--sbatch=--account=me",
        "--json",
        cwd=place,
    )
    assert done.json == {"file": "tiny.sbatch", "nodes": 4, "gpus": 8}
    text = (place / "tiny.sbatch").read_text()
    assert "#SBATCH --nodes=4" in text and "#SBATCH --account=me" in text and "--set train.steps=2" in text
    done = this_process("launch", "slurm", "tiny.toml", "--set", "train.stps=2", "-o", "other.sbatch", cwd=place)
    assert done.code == 2 and "stps" in done.err and not (place / "other.sbatch").exists()


def test_several_machines_are_told_what_must_be_firewalled(place: Path) -> None:
    one, two = (this_process("check", "tiny.toml", "--nnodes", n, "--json", cwd=place).json for n in (1, 2))
    (told,) = [problem for problem in two["problems"] if problem not in one["problems"]]
    assert (told["level"], told["message"], told["hint"]) == ("warning", OPEN_PORTS.message, OPEN_PORTS.hint)
    assert two["ok"]
    page = " ".join((Path(__file__).parents[2] / "docs" / "scaling.md").read_text("utf-8").split())
    assert OPEN_PORTS.message in page and str(OPEN_PORTS.hint) in page
