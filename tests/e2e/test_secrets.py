"""Secrets in everything that a run is given, and none in anything that it leaves: every file is read."""

from __future__ import annotations

import html
import json
import subprocess
import tarfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from command_line import Done, this_process
from secret_texts import PARTS, SECRETS, VALUE
from small_runs import recipe_text

from vlmrl.redaction.redact import HIDDEN
from vlmrl.store.runs import open_run

JUDGE = "Qq7-Zz9-Xx5-Vv3"
"""In the environment, and in a row of the data."""
EVERYTHING = "\n".join(SECRETS)
REWARD = """
import os

def score(x, api_key=None, late=False):
    assert api_key == "{value}" and os.environ["JUDGE_API_KEY"]
    if late:
        raise ValueError(f"the judge at https://j.x/?token={value} refused " + os.environ["JUDGE_API_KEY"])
    return min(1.0, x.response.count("e") / 4) + len(x.response) / 1000
"""
PROMPT = '{{# {everything} #}}Which number? token = "{value}" {{{{ hint }}}}'
RECIPE = """
rollout = {prompts_per_step = 2, samples_per_prompt = 2, max_new_tokens = 4, max_prompt_tokens = 400}
train.steps = 1
train.rehearsal = false
eval = {every_steps = 0, max_rows = 2}
optim.lr = 1e-3
"""
ROWS = [{"question": "?", "hint": f"as {JUDGE} says", "answer": f"{i} {JUDGE}"} for i in range(4)]


def commented(text: str, mark: str) -> str:
    return "".join(f"{mark} {line}\n" for line in text.splitlines())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A repository with changes that are not committed, in which everything holds secrets."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "reward.py").write_text(commented(EVERYTHING, "#") + REWARD.replace("{value}", VALUE))
    quiet = EVERYTHING.replace("{#", "{ #").replace("#}", "# }")
    (folder / "prompt.jinja").write_text(PROMPT.format(everything=quiet, value=VALUE))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = '[[data]]\npath = "rows.jsonl"\nprompt = "prompt.jinja"\ncolumns = {answer = "answer"}\n'
    reward = f'reward = {{name = "reward.py:score", args = {{api_key = "{VALUE}"}}}}\n'
    (folder / "r.toml").write_text(commented(EVERYTHING, "#") + recipe_text(tiny_folder, RECIPE + reward) + data)
    (folder / "notes.txt").write_text("nothing\n")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (["init", "-q"], ["add", "notes.txt"], [*who, "commit", "-qm", "1"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)
    (folder / "notes.txt").write_text(EVERYTHING)
    return folder


def command(place: Path, *words: str) -> Done:
    return this_process(*words, cwd=place, env={"JUDGE_API_KEY": JUDGE, "GIT_CEILING_DIRECTORIES": str(place.parent)})


@pytest.fixture(scope="module")
def run(place: Path):
    done = command(place, "train", "r.toml", "--name", "open", "--note", SECRETS[0], "--tag", SECRETS[1])
    assert done.code == 0, done.err
    evaluate = ("eval", "open", "--checkpoint", "last", "--split", "train", "--max-rows", "2")
    assert "`reward.args.api_key` held a secret" in command(place, *evaluate).err
    done = command(place, *evaluate, "--set", f"reward.args.api_key={VALUE}")
    assert done.code == 0, done.err
    assert command(place, "report", "open").code == 0
    assert command(place, "runs", "pack", "open", "-o", "open.tar.gz", "--checkpoints", "all").code == 0
    return open_run(place / "runs", "open")


def text_of(path: Path) -> str:
    if path.suffix == ".parquet":
        return json.dumps(pq.read_table(path).to_pylist(), default=str, ensure_ascii=False)
    content = path.read_bytes().decode("utf-8", "replace")
    return html.unescape(content) if path.suffix == ".html" else content


def leaks(folder: Path) -> list[str]:
    """Files and what stands in them that nobody may read there."""
    found = []
    for path in (p for p in folder.rglob("*") if p.is_file() and p.name != "tokenizer.json"):
        text = text_of(path)
        found += [f"{path.relative_to(folder)}: {part}" for part in (*PARTS, JUDGE) if part in text]
    return found


def test_no_file_of_a_run_holds_a_secret_and_every_kind_of_file_had_one(run):
    assert leaks(run.dir) == []
    hidden = {p.relative_to(run.dir).as_posix() for p in run.dir.rglob("*") if p.is_file() and HIDDEN in text_of(p)}
    kept = {p.relative_to(run.dir).as_posix() for p in (run.dir / "kept").iterdir()}
    evaluated = {p.relative_to(run.dir).as_posix() for p in run.dir.glob("eval/*/*") if p.name != "SHA256SUMS"}
    given = {"manifest.json", "recipe.toml", "resolved.json", "code.diff"}
    assert given | kept | evaluated | {"rollouts/000001.parquet", "report.html"} <= hidden
    assert len(kept) == len(evaluated) == 2


def test_an_archive_holds_none(run, place: Path, tmp_path: Path):
    with tarfile.open(place / "open.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    assert leaks(tmp_path) == [] and list(tmp_path.rglob("*.parquet"))


def test_a_run_that_hides_what_it_was_given_is_whole_and_scores_the_same(run, place: Path):
    assert command(place, "runs", "verify", "open").code == 0
    refused = command(place, "reward-check", "open")
    assert refused.code == 2 and "the argument `api_key` of the reward held a secret" in refused.err
    again = command(place, "reward-check", "open", "--reward", "reward.py:score", "--set", f"api_key={VALUE}", "--json")
    assert again.code == 0, again.err
    diff = json.loads(again.out)["diff"]
    assert (diff["compared"], diff["value"]["changed"]) == (4, 0)


def test_a_resume_wants_the_secret_again_and_sees_no_change_in_it(run, place: Path):
    words = ("train", "--resume", "open", "--set", "train.steps=2")
    refused = command(place, *words)
    assert refused.code == 2 and "`reward.args.api_key` held a secret" in refused.err
    done = command(place, *words, "--set", f"reward.args.api_key={VALUE}")
    assert done.code == 0, done.err
    changes = [c["what"] for c in open_run(place / "runs", "open").manifest.attempts[-1].changes]
    assert changes == ["train.steps"] and leaks(run.dir) == []


def test_an_exception_that_quotes_a_secret_is_recorded_without_it(place: Path):
    done = command(place, "train", "r.toml", "--name", "failing", "--set", "reward.args.late=true")
    assert done.code == 2
    run = open_run(place / "runs/unfinished", "failing")
    assert run.status == "failed" and "the judge at https://j.x/?token=<redacted> refused" in (run.manifest.error or "")
    assert leaks(run.dir) == []
