"""What is recorded of code and machine, and what never is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlmrl.redaction.redact import HIDDEN, redact_argv, redact_text
from vlmrl.store.provenance import git_state, hardware, packages

TOKEN = "hf_" + "Ab3d" * 8


def git(folder: Path, *args: str) -> None:
    identity = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    subprocess.run(["git", "-C", str(folder), *args], check=True, capture_output=True, env={**os.environ, **identity})


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["--token", "abc"], ["--token", HIDDEN]),
        (["--hf-token=abc", "x"], [f"--hf-token={HIDDEN}", "x"]),
        (["--set", "reward.args.api_key=abc"], ["--set", f"reward.args.api_key={HIDDEN}"]),
        (["--password", "-x"], ["--password", "-x"]),
        (["--set", "rollout.max_new_tokens=512"], ["--set", "rollout.max_new_tokens=512"]),
        (["--set", "rollout.stop_token=<|im_end|>"], ["--set", "rollout.stop_token=<|im_end|>"]),
        ([f"https://user:{TOKEN}@host/x"], [f"https://{HIDDEN}@host/x"]),
        (["https://user:pass@host/x"], [f"https://{HIDDEN}@host/x"]),
        ([TOKEN], [HIDDEN]),
        (["sk-proj-abcdefghijklmnop"], [HIDDEN]),
        (["--keep-last", "3", "--key", "k"], ["--keep-last", "3", "--key", HIDDEN]),
    ],
)
def test_a_command_line_keeps_settings_and_hides_secrets(argv: list[str], wanted: list[str]):
    assert redact_argv(argv) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("api_key = 'abc'", f"api_key = '{HIDDEN}'"),
        ('"password": "abc", "x": 1', f'"password": "{HIDDEN}", "x": 1'),
        ("AWS_SECRET_ACCESS_KEY=abcdef", f"AWS_SECRET_ACCESS_KEY={HIDDEN}"),
        ("token = 12345", "token = 12345"),
        ("pad_token = '<pad>'", "pad_token = '<pad>'"),
        ("token = 'a1b2c3d4e5f6g7'", f"token = '{HIDDEN}'"),
        ("max_new_tokens = 4096", "max_new_tokens = 4096"),
        ("monkey = 'a1b2c3d4e5f6g7'", "monkey = 'a1b2c3d4e5f6g7'"),
        ("Authorization: Bearer abcdefghijklmnopqrstuv", f"Authorization: Bearer {HIDDEN}"),
        ("plain text, nothing to hide", "plain text, nothing to hide"),
    ],
)
def test_text_keeps_settings_and_hides_secrets(text: str, wanted: str):
    assert redact_text(text) == wanted


def test_the_code_is_recorded_with_the_changes_of_tracked_files_only(tmp_path: Path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("x = 1\n")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-q", "-m", "one")
    (tmp_path / "private.env").write_text("SECRET\n")
    state, diff = git_state(tmp_path)
    assert state is not None and state["dirty"] is False and len(state["commit"]) == 40 and diff == ""
    (tmp_path / "a.py").write_text(f"x = 2\ntoken = '{TOKEN}'\n")
    state, diff = git_state(tmp_path)
    assert state is not None and state["dirty"] is True
    assert "+x = 2" in diff and "SECRET" not in diff and TOKEN not in diff


def test_a_large_diff_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vlmrl.store.provenance.MAX_DIFF_BYTES", 1000)
    git(tmp_path, "init", "-q")
    (tmp_path / "a.txt").write_text("")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-q", "-m", "one")
    (tmp_path / "a.txt").write_text("word\n" * 400)
    _, diff = git_state(tmp_path)
    assert len(diff) < 1200 and "[cut: the diff has " in diff


def test_outside_of_git_and_in_an_empty_repository_there_is_no_code_state(tmp_path: Path):
    assert git_state(tmp_path) == (None, "")
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == (None, "")


def test_hardware_and_packages_are_told_without_importing_torch():
    code = "from vlmrl.store.provenance import *; hardware(); packages(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert hardware()["memory_bytes"] > 0 and packages()["numpy"]


@pytest.mark.parametrize(("asked", "limit"), [("1", 1), ("", None), ("0", None), ("two", None), ("100000", None)])
def test_threads_are_the_cores_of_this_process_and_at_most_what_omp_num_threads_asks(monkeypatch, asked, limit):
    from vlmrl.store.provenance import usable_threads

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = usable_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert usable_threads() == (limit or cores) >= 1
