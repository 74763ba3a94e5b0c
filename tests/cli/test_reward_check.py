from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import Done, this_process
from reward_runs import make_pair_run, make_table_run

EXACT = "def reward(x): return float(x.response == x.truth['answer'])\n"


@pytest.fixture
def vlmrl(tmp_path: Path) -> Callable[..., Done]:
    """Run `vlmrl reward-check ...` in this process, in tmp_path."""
    return partial(this_process, "reward-check", cwd=tmp_path)


@pytest.fixture
def report(vlmrl: Callable[..., Done]) -> Callable[..., Any]:
    def call(*args: str) -> Any:
        done = vlmrl(*args, "--json")
        assert done.out.count("\n") == 1
        return done.json

    return call


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    make_pair_run(tmp_path / "runs")
    return tmp_path


@pytest.mark.slow
def test_a_run_is_scored_again_and_equal_and_people_get_tables(run_folder, vlmrl, report):
    found = report("last")
    assert found["stored"]["equal"] and found["samples"] == 48 and found["diff"] is None and found["probes"] is None
    assert found["rewards"]["digits"]["name"] == "taxonomy" and found["rewards"]["digits"]["changed"] == ""
    assert set(found["parts"]) == {"value", "format", "answer", "loop", "digit"}
    shown = vlmrl("im", "--rows", "60")
    assert shown.code == 0 and shown.err == ""
    first, last = (step + 1 for step in found["steps"])  # files count from 0, people from 1
    assert f"steps {first} to {last}\n" in shown.out and report("last", "--steps", "1")["steps"] == [0, 0]
    assert "equal to the stored ones, to the digit" in shown.out and "no </think>" in shown.out
    assert "no wrong answer earned more than the lowest score: all 25 earn it" in shown.out
    assert "right, yet earned least (15 of 23 earn less than the highest score)" in shown.out


def test_what_a_response_or_a_failure_says_does_not_steer_the_terminal(run_folder, vlmrl):
    (run_folder / "all.py").write_text("def score(x): return 1.0\n")
    paid = vlmrl("im", "--reward", "all.py:score", "--rows", "60").out
    assert "wrong, yet earned most (25 of 25 earn more than the lowest score)" in paid
    assert "every right answer earned the highest score: all 23 of them" in paid
    assert "[bold]x[/bold]" in paid and "\x1b[31m" not in paid
    (run_folder / "loud.py").write_text("def score(x): raise ValueError(x.response[-30:])\n")
    failed = vlmrl("im", "--reward", "loud.py:score", "--rows", "60", "--keep-going").out
    assert "[31m" in failed and "\x1b[31m" not in failed


@pytest.mark.slow
def test_torch_is_not_imported(run_folder, vlmrl, report):
    code = (
        "import sys\n"
        "sys.argv = ['vlmrl', 'reward-check', 'last', '--diff', 'pair_answer', '--probe', '--json']\n"
        "from vlmrl.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not [m for m in ('torch', 'transformers', 'datasets') if m in sys.modules], 'heavy'\n"
        "print('light', file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=run_folder, check=False)
    assert "light" in done.stderr, done.stderr
    assert json.loads(done.stdout)["diff"]["names"] == {"first": "taxonomy", "second": "pair_answer"}


@pytest.mark.slow
def test_a_diff_against_a_function_shows_groups_and_advantages(run_folder, vlmrl, report):
    (run_folder / "mine.py").write_text("def score(x): return {'short': 1.0 / (1 + len(x.response)), 'other': None}\n")
    found = report("last", "--diff", "mine.py:score")
    assert found["stored"]["equal"]
    diff = found["diff"]
    assert diff["names"]["second"] == "mine.py:score" and diff["groups"]["number"] == 12
    assert diff["parts"]["short"]["first"] is None and diff["parts"]["format"]["second"] is None
    assert diff["changed"] and diff["changed"][0]["text"]
    shown = vlmrl("last", "--diff", "mine.py:score")
    assert "groups without a signal" in shown.out and "sign changes" in shown.out


def test_weights_and_arguments_of_the_runs_own_reward(run_folder, vlmrl, report):
    by_weights = report("last", "--weights", "answer=1")
    assert by_weights["stored"]["equal"] and by_weights["diff"]["value"]["changed_share"] > 0
    assert by_weights["rewards"]["digits"]["weights"] == {"answer": 1.0}
    by_args = report("last", "--set", "partial=false", "--set", "answer=truncated_bce")
    assert by_args["rewards"]["digits"]["args"] == {
        "levels": ["loop", "digit"],
        "partial": False,
        "answer": "truncated_bce",
    }
    assert by_args["diff"]["parts"]["answer"]["changed_share"] > 0


def test_another_reward_by_name_gets_the_levels(run_folder, vlmrl, report):
    found = report("last", "--reward", "taxonomy", "--set", "consistency='part'")
    assert found["stored"] is None and "consistency" in found["parts"]
    assert found["diff"]["names"]["first"] == "as stored"


@pytest.mark.slow
def test_the_probe_finds_nothing_in_the_builtin_and_holes_in_a_search(run_folder, vlmrl, report):
    assert report("last", "--probe")["probes"]["digits"]["flagged"] == 0
    (run_folder / "mine.py").write_text("def score(x): return min(1.0, len(x.response) / 1000)\n")
    found = report("last", "--reward", "mine.py:score", "--probe")
    loud = {p["name"] for p in found["probes"]["digits"]["probes"] if p["flagged"]}
    assert {"very long", "hedge at length"} <= loud
    shown = vlmrl("last", "--reward", "mine.py:score", "--probe")
    assert "very long (filler without an answer): earns 1" in shown.out
    shown = vlmrl("last", "--probe")
    assert "no trick pays" in shown.out


@pytest.mark.slow
def test_an_answer_of_the_table_cannot_steer_the_terminal_through_a_finding(run_folder, vlmrl):
    rows = [{"response": "a", "ground_truth": f"\x1b[31mred\u202e{i}", "prompt": str(i)} for i in range(3)]
    (run_folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_folder / "mine.py").write_text("def score(x): return min(1.0, len(x.response) / 1000)\n")
    shown = vlmrl("rows.jsonl", "--reward", "mine.py:score", "--probe")
    assert "the right answer (which must earn most" in shown.out and "[31mred" in shown.out
    assert "\x1b" not in shown.out and "\u202e" not in shown.out


@pytest.mark.parametrize(
    ("prompt", "condition", "code"),
    [("", "probe", 5), ("", "probe,errors>=0", 3), ("Write ~N~, as in <n>N</n>.", "probe", 0), ("", None, 5)],
)
def test_a_form_that_is_not_known_is_not_probed_and_has_an_exit_code(run_folder, vlmrl, prompt, condition, code):
    rows = [{"response": "?", "ground_truth": str(n), "prompt": f"{prompt} {n}"} for n in (3, 5, 7)]
    (run_folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    body = "def score(x): return float(x.response == f'<n>{x.truth[\"answer\"]}</n>')\n"
    (run_folder / "mine.py").write_text(body)
    options = ["--fail-on", condition] if condition else ["--probe"]
    shown = vlmrl("rows.jsonl", "--reward", "mine.py:score", *options)
    assert shown.code == code
    assert ("not probed: no right answer that was tried earns more" in shown.out) is (code != 0)
    assert ("no trick pays" in shown.out) is (code == 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ValueError('no colour')", "ValueError: no colour"),
        ("return float('nan')", "is nan, not a finite number"),
        ("return 'good'", "is 'good', not a finite number"),
        ("return {'a': None}", "no part of the reward applies: a"),
        ("import os; os._exit(5)", "exit code 5"),
    ],
)
def test_a_bad_reward_is_told_with_its_row_and_without_our_traceback(run_folder, body, words, vlmrl, report):
    (run_folder / "mine.py").write_text(f"def score(x):\n    {body}\n")
    done = vlmrl("last", "--diff", "mine.py:score", "--json")
    assert done.code == 2 and done.out == ""
    assert words in done.err and "step 1, row 0-0 of digits, sample 0" in done.err
    assert "Traceback" not in done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nothing"], "no run `nothing`"),
        (["."], "the folder holds neither a run nor saved rollouts"),
        (["last", "--diff", "nope.py:f"], "there is no reward file nope.py"),
        (["last", "--diff", "taxonomi"], "did you mean `taxonomy`"),
        (["last", "--set", "partal=true"], "takes no argument `partal`"),
        (["last", "--set", "partial"], "not of the form name=value"),
        (["last", "--weights", "colour=1"], "its weights name colour, but the parts"),
        (
            ["last", "--weights", "colour=1,answer=1"],
            "names the part `colour`, which reward `taxonomy` does not return",
        ),
        (["last", "--weights", "answer:1"], "part=number"),
        (["last", "--html", "/dev/null/page.html"], "cannot make the folder"),
        (["last", "--steps", "a"], "not a step"),
        (["last", "--fail-on", ""], "is not a condition"),  # of an unset variable, it must not pass
        (["answers.txt", "--task", "digits"], "a table of responses (.jsonl, .json, .csv or .parquet)"),
        (["last", "--steps", "90"], "no saved rollouts in steps 90 to 90"),
        (["last", "--steps", "0"], "steps are counted from 1"),
        (["last", "--source", "birds"], "no saved rollouts of source `birds`"),
        (["last", "--reward", "taxonomy", "--style", "swift"], "unknown reward style"),
    ],
)
def test_mistakes_are_told(run_folder, args, words, vlmrl, report):
    done = vlmrl(*args)
    assert done.code == 2 and words in done.err and "Traceback" not in done.err


def test_a_table_can_neither_steer_the_terminal_nor_break_the_json(tmp_path, vlmrl, report):
    (tmp_path / "r.py").write_text("def score(x): return float(len(x.response))\n")
    (tmp_path / "head.csv").write_text("resp\x1b[31monse,ground_truth\na,1\n")
    done = vlmrl("head.csv", "--reward", "r.py:score")
    assert done.code == 2 and "resp\\u001b[31monse" in done.err and "\x1b" not in done.err
    row = {"response": "\ud800 half a character", "ground_truth": "\udfff", "group": "\x1b[31m", "images": "\ud800.png"}
    (tmp_path / "half.jsonl").write_text(json.dumps(row) + "\n")
    found = report("half.jsonl", "--reward", "r.py:score", "--html", "page.html", "--out", "scores.parquet")
    assert found["extremes"]["paid_most"][0]["text"] == "\ud800 half a character"
    assert "\\ud800 half a character" in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.slow
def test_a_reward_that_is_not_deterministic_is_an_error_and_a_changed_one_a_warning(tmp_path, vlmrl, report):
    file = tmp_path / "r.py"
    file.write_text("import random\n" + EXACT.replace("float(", "random.random() * float("))
    make_table_run(tmp_path / "runs", file)
    done = vlmrl("last")
    assert done.code == 2 and "is not deterministic" in done.err and "Traceback" not in done.err
    file.write_text(EXACT)
    done = vlmrl("last")
    assert done.code == 0 and "has changed since the run" in done.out and "differ from the stored ones" in done.out


GRADED = """
def reward(x):
    right = x.response == x.truth["answer"]
    return {"reward": 0.3 + 0.5 * right, "acc": {accuracy}}
"""


@pytest.mark.slow
def test_the_accuracy_of_a_users_reward_is_held_against_its_score(tmp_path, vlmrl, report):
    (tmp_path / "r.py").write_text(GRADED.replace("{accuracy}", "right"))
    make_table_run(tmp_path / "runs", tmp_path / "r.py")
    found = report("last")["disagreements"]
    assert (found["accuracy"], found["binary"], found["agreement"]) == (pytest.approx(1 / 3), True, 1.0)
    assert (found["right"], found["wrong"]["paid"]) == ({"number": 4, "mean": 0.8, "unpaid": 0}, 8)
    shown = vlmrl("last").out
    assert "weights its own, accuracy is its part acc" in shown and "accuracy 33.3%; a right answer outscores" in shown
    assert "wrong, yet earned most (8 of 8 earn more than the lowest score)" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accuracy", "told"),
    [
        ("1 if right else -1", "accuracy -0.3333, the mean; 33.3% right; a right answer outscores"),
        ("0.5", "mean accuracy 0.5: answers are not only right or wrong"),
    ],
)
def test_an_accuracy_that_is_no_share_is_told_as_a_mean(tmp_path, vlmrl, accuracy, told):
    (tmp_path / "r.py").write_text(GRADED.replace("{accuracy}", accuracy))
    make_table_run(tmp_path / "runs", tmp_path / "r.py")
    done = vlmrl("last")
    assert done.code == 0 and told in done.out


def test_a_table_is_right_or_wrong_by_the_reward_that_scores_it(tmp_path, report):
    (tmp_path / "r.py").write_text("def f(solution_str, ground_truth): return float(solution_str == ground_truth)\n")
    rows = [{"response": text, "ground_truth": "4"} for text in ("4", "5", "6", "4")]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = report("t.jsonl", "--reward", "r.py:f")
    assert found["disagreements"]["accuracy"] == 0.5 and found["rewards"]["t"]["accuracy"] == "score"


@pytest.mark.slow
def test_token_ids_are_those_of_the_run_or_of_the_tables_column(tmp_path, vlmrl, report):
    (tmp_path / "r.py").write_text("def f(completion_ids, **kw): return [float(sum(ids)) for ids in completion_ids]\n")
    make_table_run(tmp_path / "runs", tmp_path / "r.py", "f")  # every response there has the ids 5, 6, 7
    found = report("last")
    assert found["stored"]["equal"] and found["parts"]["value"]["mean"] == 18.0
    row = {"response": "a", "ground_truth": "b"}
    (tmp_path / "ids.jsonl").write_text(json.dumps(row | {"completion_ids": [1, 2]}) + "\n")
    (tmp_path / "none.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "ids.csv").write_text('response,ground_truth,token_ids\na,b,"[4, 5]"\n')
    assert report("ids.jsonl", "--reward", "r.py:f")["parts"]["value"]["mean"] == 3.0
    assert report("ids.csv", "--reward", "r.py:f")["parts"]["value"]["mean"] == 9.0
    refused = vlmrl("none.jsonl", "--reward", "r.py:f")
    assert refused.code == 2 and "needs `completion_ids`, but no token ids are saved with" in refused.err
    assert "none.jsonl:1" in refused.err and "a table needs a column `completion_ids`" in refused.err


@pytest.mark.slow
def test_responses_that_a_reward_does_not_judge_are_no_failures(tmp_path, vlmrl, report):
    source = "def f(completions, level, **kw): return [None if n == 2 else 1.0 for n in level]\n"
    (tmp_path / "r.py").write_text(source)
    make_table_run(tmp_path / "runs", tmp_path / "r.py", "f")
    found = report("last")
    assert found["stored"]["equal"] and found["errors"]["number"] == 0
    assert vlmrl("last", "--fail-on", "errors").code == 0
    assert "failed: the reward does not apply to this response" in vlmrl("last").out


FLAKY = """from vlmrl import RewardUnavailable
def score(x):
    if "down" in x.response:
        raise RewardUnavailable("429 from judge:8000")
    if "bug" in x.response:
        raise ValueError("a bug")
    return {"answer": float(x.response == "7")}
"""


def test_rows_without_a_service_are_counted_and_the_others_are_scored(tmp_path):
    (tmp_path / "flaky.py").write_text(FLAKY)

    def checked(*responses, options=()):
        rows = [json.dumps({"response": text, "ground_truth": "7"}) + "\n" for text in responses]
        (tmp_path / "rows.jsonl").write_text("".join(rows))
        words = ("reward-check", "rows.jsonl", "--out", "out.jsonl", *options, "--json")
        return this_process(*words, *(() if options else ("--reward", "flaky.py:score")), cwd=tmp_path)

    done = checked("7", "down", "8")
    assert done.code == 75 and "1 of 3 rows have no score: 429 from judge:8000" in done.err
    assert "run the same command again" in done.err
    assert json.loads(done.out)["errors"] == {
        "number": 0, "first": [], "unavailable": 1, "unavailable_why": "429 from judge:8000"
    }  # fmt: skip
    scores = [json.loads(line)["score"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert scores == [1.0, None, 0.0]
    compared = checked("7", "down", options=("--reward", "exact_match", "--diff", "flaky.py:score"))
    assert compared.code == 75 and json.loads(compared.out)["diff"]["errors"]["unavailable"] == 1
    broken = checked("7", "down", "bug")
    assert broken.code == 2 and "ValueError: a bug" in broken.err
    (tmp_path / "out.jsonl").unlink()
    nothing = checked("down", "down again")
    assert nothing.code == 75 and not (tmp_path / "out.jsonl").exists()
    assert "`flaky.py:score` is unavailable, and no row has a score: 429 from judge:8000" in nothing.err
