"""The quickstart of README: its files and its commands, exactly as they are written, in their order."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import this_process

README = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")
QUICKSTART = README.split("<!-- quickstart: begin -->")[1].split("<!-- quickstart: end -->")[0]
NAMED_FILE = re.compile(
    r"`(count/[\w.]+)`[^`]*?(?:`<[^`]*`[^`]*?)?\n\n```(jinja|python|toml|json)\n(.*?)```", flags=re.S
)

TEXTS = ("prompt.jinja", "reward.py", "recipe.toml", "test_count.py")


@pytest.mark.slow
def test_the_quickstart_works_as_it_is_written(tmp_path: Path) -> None:
    commands = [shlex.split(line, comments=True)[1:] for line in re.findall(r"^\$ (vlmrl .*)$", QUICKSTART, flags=re.M)]
    first, *others = commands
    assert first[0] == "init" and len(others) == 7 and QUICKSTART.count("\n") <= 90
    assert this_process(*first, cwd=tmp_path).code == 0
    files = {path: (language, text) for path, language, text in NAMED_FILE.findall(QUICKSTART)}
    assert set(files) == {f"count/{name}" for name in (*TEXTS, "rows.jsonl")}
    for path, (language, text) in files.items():
        if language == "json":  # a row of the table
            assert text in (tmp_path / path).read_text("utf-8")
        else:
            (tmp_path / path).write_text(text)
    passed = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "count"], cwd=tmp_path, capture_output=True, text=True
    )
    assert passed.returncode == 0, passed.stdout
    ended = [this_process(*words, cwd=tmp_path) for words in others]
    assert [(words[0], done.code, done.err) for words, done in zip(others, ended, strict=True) if done.code] == []
    made, checked, tried, trained, scored, diagnosed, reported = (done.out + done.err for done in ended)
    assert "a tiny Qwen2.5-VL" in made and "no problems" in checked
    assert "How many black squares" in tried and "step 2/2" in trained
    assert "are equal to the stored ones, to the digit" in scored
    assert "1. " in diagnosed and "report.html" in reported
