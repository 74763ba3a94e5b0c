"""The queue of runs: what it starts, leaves out and resumes, with real processes that write real run folders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import assert_all_gone, awaited

from vlmrl.errors import LaunchError
from vlmrl.launch.gpu_assignment import Placement
from vlmrl.launch.queue import Member, Queue, Slot, make_slots, plan_members, split_values
from vlmrl.store.listing import list_runs

STUB = """
# Stands in for `vlmrl train`: a run that takes a moment, is interrupted by SIGINT, and fails when told to.
import os, signal, sys, time
from pathlib import Path
from vlmrl.store.runs import create_run, resume_run
words = sys.argv[1:]
value = lambda name: words[words.index(name) + 1]
root = value("--runs")
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
if "--resume" in words:
    run = resume_run(root, value("--resume"))
else:
    run = create_run(root, kind="rl", recipe_name="stub", name=value("--name"), tags=[value("--tag")], argv=words)
Path(root, "pid-" + run.manifest.name).write_text(str(os.getpid()))
with open(Path(root, "order"), "a") as file:
    file.write(f"{run.manifest.name} {run.attempt} {os.environ.get('SLOT')}\\n")
end = time.monotonic() + float(os.environ["STUB_SECONDS"])
while time.monotonic() < end and not asked:
    time.sleep(0.02)
if "fails" in run.manifest.name:
    print("error: the reward is wrong", file=sys.stderr)
    run.finish("failed", "the reward is wrong")
    sys.exit(2)
run.finish("interrupted" if asked else "done")
sys.exit(130 if asked else 0)
"""


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A queue of these members over the stub, and what it said."""
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setenv("STUB_SECONDS", "0.1")
    said: list[str] = []

    def make(*names: str, slots: int = 1) -> tuple[Queue, list[str]]:
        root = tmp_path / "runs"
        root.mkdir(exist_ok=True)
        members = [Member(name, (("train.seed", str(n)),)) for n, name in enumerate(names)]
        command = [sys.executable, str(tmp_path / "stub.py")]
        return Queue(
            command,
            ["recipe.toml"],
            ["--runs", str(root)],
            members,
            [Slot({"SLOT": str(n)}) for n in range(slots)],
            root,
            "group",
            said.append,
        ), said

    return make


def order(queue: Queue) -> list[list[str]]:
    return [line.split() for line in (queue.root / "order").read_text().splitlines()]


@pytest.mark.slow
def test_every_member_runs_once_and_a_second_queue_has_nothing_to_do(queue) -> None:
    first, said = queue("a", "b", "c")
    assert first.run() == 0
    assert [line[:2] for line in order(first)] == [["a", "1"], ["b", "1"], ["c", "1"]]
    assert list_runs(first.root, tag="group")[0].raw["tags"] == ["group"]
    again, said = queue("a", "b", "c")
    assert again.run() == 0 and len(order(again)) == 3 and "3 of 3 runs are already done" in said


@pytest.mark.slow
def test_added_members_run_alone(queue) -> None:
    assert queue("a", "b")[0].run() == 0
    longer, _ = queue("a", "b", "c")
    assert longer.run() == 0 and [line[0] for line in order(longer)] == ["a", "b", "c"]


@pytest.mark.slow
def test_slots_run_side_by_side_each_on_its_gpus(queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_SECONDS", "1.5")
    both, _ = queue("a", "b", slots=2)
    assert both.run() == 0
    assert sorted(line[2] for line in order(both)) == ["0", "1"]
    starts = {run.name: run.raw for run in list_runs(both.root)}
    assert starts["a"]["start"] < starts["b"]["end"] and starts["b"]["start"] < starts["a"]["end"]


@pytest.mark.slow
def test_a_failed_run_does_not_stop_the_others_and_is_told(queue) -> None:
    mixed, said = queue("a", "fails", "c")
    assert mixed.run() == 2
    assert [line[0] for line in order(mixed)] == ["a", "fails", "c"]
    assert any("fails: failed: the reward is wrong; log: " in text for text in said)
    retried, _ = queue("a", "fails", "c")
    assert retried.run() == 2 and order(retried)[-1][:2] == ["fails", "2"]


QUEUE = """
import sys
from pathlib import Path
from vlmrl.launch.queue import Member, Queue, Slot
root = Path(sys.argv[1])
members = [Member(name, (("train.seed", "1"),)) for name in ("a", "b", "c")]
stub = [sys.executable, str(root.parent / "stub.py")]
sys.exit(Queue(stub, ["r.toml"], ["--runs", str(root)], members, [Slot({})], root, "group", print).run())
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_or_killed_queue_goes_on_where_it_was(queue, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    done, _ = queue("a")
    assert done.run() == 0
    monkeypatch.setenv("STUB_SECONDS", "600")
    process = subprocess.Popen([sys.executable, "-c", QUEUE, str(done.root)], start_new_session=True)
    child = int(awaited(done.root / "pid-b", process))
    os.kill(process.pid, number)
    assert process.wait(60) == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert_all_gone([child], 10)
    expected = "interrupted" if number == signal.SIGINT else "killed"
    assert {r.name: r.status for r in list_runs(done.root)} == {"a": "done", "b": expected}
    monkeypatch.setenv("STUB_SECONDS", "0.1")
    rest, said = queue("a", "b", "c")
    assert rest.run() == 0
    assert [line[:2] for line in order(rest)] == [["a", "1"], ["b", "1"], ["b", "2"], ["c", "1"]]
    assert "resuming b" in said and "starting c" in said


def test_members_are_all_pairs_of_seeds_and_values_with_names_of_their_own() -> None:
    members = plan_members("im", "text", "1,2", ["optim.lr=1e-6,3e-6"])
    assert [dict(m.values) for m in members] == [
        {"optim.lr": lr, "train.seed": seed} for lr in ("1e-6", "3e-6") for seed in ("1", "2")
    ]
    assert members[0].overrides == ["--set", "optim.lr=1e-6", "--set", "train.seed=1"]
    assert members[0].name.startswith("im-lr1e-6-seed1-") and len({m.name for m in members}) == 4
    longer = plan_members("im", "text", "1,2,3", ["optim.lr=1e-6,3e-6"])
    assert {m.name for m in members} < {m.name for m in longer}, "a longer queue would repeat what is done"
    assert not {m.name for m in members} & {m.name for m in plan_members("im", "other", "1,2", ["optim.lr=1e-6,3e-6"])}


@pytest.mark.parametrize(
    ("seeds", "grid"),
    [
        ("1,x", []),
        ("", []),
        ("1,1", []),
        (None, ["optim.lr"]),
        (None, ["=1"]),
        (None, ["a.b=1,,2"]),
        ("1", ["train.seed=2"]),
        (None, ["a=1", "a=2"]),
        (",".join(map(str, range(1001))), []),
    ],
)
def test_what_is_no_grid_is_refused(seeds: str | None, grid: list[str]) -> None:
    with pytest.raises(LaunchError):
        plan_members("im", "text", seeds, grid)


def test_lists_and_strings_are_one_value() -> None:
    assert split_values('[1, 2],"a,b",3') == ["[1, 2]", '"a,b"', "3"]


@given(st.lists(st.from_regex(r"[a-z0-9.]+", fullmatch=True), min_size=1))
def test_plain_values_are_split_at_every_comma(values: list[str]) -> None:
    assert split_values(",".join(values)) == values


def test_gpus_are_dealt_into_slots() -> None:
    slots = make_slots(Placement(5, "0,2,3,5,7", 1), 2)
    assert [s.env["CUDA_VISIBLE_DEVICES"] for s in slots] == ["0,2", "3,5"]
    assert len(make_slots(Placement(4, None, 1), 2)) == 2
    with pytest.raises(LaunchError, match="--gpus-per-run 3 needs more than the 2 GPU"):
        make_slots(Placement(2, "0,1", 1), 3)
