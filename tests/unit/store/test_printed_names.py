"""How printed commands name a run: by its name where that is clear, by its id where it is not, with its folder."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from store_builders import make_checkpoint, make_run

from vlmrl.errors import StoreError
from vlmrl.setup.model_origin import describe_origin, find_model
from vlmrl.store.checkpoints import choose_checkpoint
from vlmrl.store.listing import command_line, find, namesake_warning, reference
from vlmrl.store.manifest import edit
from vlmrl.store.runs import Run, open_run
from vlmrl.store.summary import describe


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLMRL_RUNS", raising=False)
    return tmp_path


def make(name: str | None, root: str = "runs") -> Run:
    run = make_run(Path(root), name=name)
    run.finish("interrupted")
    return run


def named_by(command: str) -> Path:
    """The run that a printed command leads to, typed in this folder."""
    words = shlex.split(command)
    root = words[words.index("--runs") + 1] if "--runs" in words else "runs"
    return find(root, words[3 if words[2] == "--resume" else 2]).resolve()


def test_a_run_is_called_by_its_name_while_that_means_it_alone(here: Path) -> None:
    nameless, one = make(None), make("one")
    assert (reference(nameless.dir, None), reference(one.dir, "one")) == (nameless.id, "one")
    second = make("one")
    assert [reference(r.dir, "one") for r in (one, second)] == [one.id, second.id]
    edit(one.dir, name="first")
    assert reference(one.dir, "first") == "first" and reference(second.dir, "one") == "one"


def test_a_name_that_is_also_a_file_here_is_not_used(here: Path) -> None:
    run = make("one")
    (here / "one").mkdir()
    assert reference(run.dir, "one") == run.id


@pytest.mark.parametrize("root", ["runs", "else where/runs"])
@pytest.mark.parametrize("name", [None, "one", "it's", "a;b"])
def test_every_printed_command_leads_to_its_run(here: Path, root: str, name: str | None) -> None:
    run = make(name, root)
    about = describe(open_run(root, run.id))
    commands = [command_line(("eval",), run.dir, name), about["report_command"], about["resume"]]
    assert [named_by(command) for command in commands] == [run.dir.resolve()] * 3
    assert ("--runs" in commands[0]) == (root != "runs")


def test_a_name_given_twice_is_said_with_a_command_that_mends_it(here: Path) -> None:
    first = make("one")
    assert namesake_warning(first.dir, "one") == ""
    second = make("one")
    warning = namesake_warning(second.dir, "one")
    assert f"`one` is also the name of run {first.id}" in warning and str(second.dir) in warning
    assert warning.endswith(f"vlmrl runs note {first.id} --name one-before")
    edit(first.dir, name="one-before")
    assert namesake_warning(second.dir, "one") == ""


def test_a_run_as_a_model_says_which_checkpoint_it_is_and_why(here: Path) -> None:
    run = make_run(Path("runs"), name="one")
    saved = [make_checkpoint(run.dir, step) for step in (3, 6)]
    run.finish("done")
    last = f"model: one is step-000006 of run {run.id}: the last; no validation has set a best one"
    assert describe_origin("one", find_model("one", Path("runs")).parent) == last
    _, why = choose_checkpoint(run.dir, run.manifest, 3)
    assert describe_origin("one", {"run": run.id, "checkpoint": saved[0].name, "why": why}) == (
        f"model: step-000003 of run {run.id}"
    )
    folder = str(saved[0])
    assert describe_origin(folder, find_model(folder, Path("runs")).parent) == f"model: step-000003 of run {run.id}"
    assert describe_origin("org/model", find_model("org/model", Path("runs")).parent) == ""


@pytest.mark.parametrize("which", [3, "3", "step-000003"])
def test_a_step_may_be_written_as_it_is_printed_and_nothing_else_means_the_last(here: Path, which: str | int) -> None:
    run = make_run(Path("runs"), name="one")
    saved = [make_checkpoint(run.dir, step) for step in (3, 6)]
    run.finish("done")
    assert choose_checkpoint(run.dir, run.manifest, which)[0] == saved[0]
    assert find_model(f"one@{which}", Path("runs")).checkpoint == saved[0]
    assert find_model("one@last", Path("runs")).checkpoint == saved[1]
    for wrong in ("step-3", "step-000004", "newest", "-3", ""):
        with pytest.raises(StoreError, match=r"does not name a checkpoint|has no checkpoint 4"):
            choose_checkpoint(run.dir, run.manifest, wrong)
    assert find_model("one@newest", Path("runs")).checkpoint is None, "taken for the name of a hub model"
