"""How commands end that are interrupted, or whose standard streams are closed or read no further."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from command_line import COMMAND, started, this_process

from vlmrl.errors import Interruption
from vlmrl.store.runs import create_run

INTERRUPTED = [
    ("vlmrl.store.pack.pack_run", ("runs", "pack", "one"), "runs was interrupted: changes already made are kept"),
    ("vlmrl.report.page.write_report", ("report", "one"), "report was interrupted: no incomplete files are left"),
    (
        "vlmrl.store.checkpoints.choose_checkpoint",
        ("merge", "one"),
        "merge was interrupted: no incomplete files are left",
    ),
    (
        "vlmrl.setup.model_origin.find_model",
        ("eval", "one"),
        "eval was interrupted: finished evaluations and responses are kept",
    ),
    (
        "vlmrl.reward_check.response_tables.is_table",
        ("reward-check", "one"),
        "reward-check was interrupted: no incomplete files",
    ),
    ("vlmrl.recipe.load.load_recipe", ("fetch", "r.toml"), "fetch was interrupted: what was downloaded is kept"),
    ("vlmrl.setup.checked_recipe.load_checked", ("try", "r.toml"), "try was interrupted: no incomplete files are left"),
    ("vlmrl.launch.start.prepare", ("sft", "r.toml"), "sft was interrupted: no incomplete files are left"),
]


def interrupted(*given: object, **named: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("where", "words", "line"), INTERRUPTED, ids=[words[0] for _, words, _ in INTERRUPTED])
def test_an_interrupted_command_says_what_is_kept_and_how_to_go_on(tmp_path, monkeypatch, where, words, line) -> None:
    create_run(tmp_path / "runs", kind="rl", recipe_name="r", name="one").finish("done")

    monkeypatch.setattr(where, interrupted)
    done = this_process(*words, cwd=tmp_path)
    assert (done.code, done.out) == (130, "") and done.err.startswith(line), done
    assert done.err.endswith(f"; continue with: {shlex.join(['vlmrl', *words])}\n") and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("where", "words", "line"),
    [
        ("vlmrl.store.summary.Followed", ("runs", "watch", "one"), "stopped watching\n"),
        ("vlmrl.evaluate.compare.compare", ("compare", "one", "one"), ""),
    ],
)
def test_a_command_that_only_reads_has_nothing_to_say_of_what_is_kept(
    tmp_path, monkeypatch, where, words, line
) -> None:
    create_run(tmp_path / "runs", kind="rl", recipe_name="r", name="one").finish("done")

    monkeypatch.setattr(where, interrupted)
    done = this_process(*words, cwd=tmp_path)
    assert (done.code, done.out, done.err) == (130, "", line)


def test_what_an_interrupted_command_knows_itself_is_said_instead(tmp_path, monkeypatch) -> None:
    def told(*given: object, **named: object) -> None:
        raise Interruption("train of run x", "its last checkpoint is step-000004", "vlmrl train --resume x")

    monkeypatch.setattr("vlmrl.launch.start.prepare", told)
    done = this_process("train", "r.toml", cwd=tmp_path)
    expected = (
        "train of run x was interrupted: its last checkpoint is step-000004; continue with: vlmrl train --resume x\n"
    )
    assert (done.code, done.err) == (130, expected)


def test_the_command_to_go_on_with_holds_no_secret(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("vlmrl.recipe.load.load_recipe", interrupted)
    done = this_process("fetch", "r.toml", "--set", "reward.args.api_key=abcdefgh12345678", cwd=tmp_path)
    assert done.code == 130 and "abcdefgh12345678" not in done.err and "vlmrl fetch r.toml" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_command_with_a_word_and_exit_code_130(tmp_path: Path, number: signal.Signals) -> None:
    run = create_run(tmp_path / "runs", kind="rl", recipe_name="r", name="one")
    run.log(0, "train", {"reward/mean": 0.5})
    watch = started("runs", "watch", "one", cwd=tmp_path, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert watch.stdout is not None and watch.stdout.readline().startswith("step")  # it waits for more
    watch.send_signal(number)
    out, err = watch.communicate(timeout=60)
    assert (watch.returncode, out) == (130, "") and "Traceback" not in err, err
    assert err == "stopped watching\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirections", "shown"), [(">&-", ""), ("2>&-", "one"), ("<&-", "one"), ("<&- >&- 2>&-", "")]
)
def test_closed_streams_change_nothing_but_what_is_seen(tmp_path: Path, redirections: str, shown: str) -> None:
    create_run(tmp_path / "runs", kind="rl", recipe_name="r", name="one").finish("done")
    line = f"{shlex.join(COMMAND)} runs list {redirections}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and shown in done.stdout and done.stderr == "", done


def test_an_error_keeps_its_exit_code_where_nobody_can_read_it(tmp_path: Path) -> None:
    line = f"{shlex.join(COMMAND)} runs show none 2>&-"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_a_reader_that_has_gone_ends_a_command_without_a_word(tmp_path: Path) -> None:
    run = create_run(tmp_path / "runs", kind="rl", recipe_name="r", name="one")
    run.log(0, "train", {"reward/mean": 0.5})
    watch = started("runs", "watch", "one", "--every", "0.1", cwd=tmp_path)
    assert watch.stdout is not None and watch.stderr is not None and watch.stdout.readline().startswith("step")
    watch.stdout.close()
    end = time.monotonic() + 60
    step = 1
    while watch.poll() is None and time.monotonic() < end:
        run.log(step, "train", {"reward/mean": 0.5})
        step += 1
        time.sleep(0.1)
    assert (watch.wait(5), watch.stderr.read()) == (141, "")
    watch.stderr.close()
    run.finish("done")
