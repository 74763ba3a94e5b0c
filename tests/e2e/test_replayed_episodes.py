"""Calls of saved episodes, run again: equal, or told where they differ; of an environment that has changed since."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from test_episode_runs import CODE, place, run, vlmrl  # noqa: F401

from vlmrl.store import layout
from vlmrl.types import EPISODE_LIMITS


def test_the_stored_calls_give_what_is_stored(run, place, tmp_path):  # noqa: F811
    report = vlmrl(run, place, "reward-check", run.id, "--replay", "--json")
    assert report.code == 0, report.err
    called = [s for n in range(3) for g in run.read_rollouts(n) for s in g.samples if len(s.turns) > 1]
    assert len(called) == 27, "reset shows something in each"
    assert report.json == {
        "episodes": len(called), "equal": len(called), "alone": 0, "changed": {"digits": []}, "first": None,
    }  # fmt: skip
    assert any(turn.errors for s in called for turn in s.turns) and any(turn.media for s in called for turn in s.turns)
    (rows,) = [folder / layout.EVAL_ROWS for folder in layout.eval_dirs(run.dir) if folder.name.endswith("000003")]
    assert vlmrl(run, place, "reward-check", rows, "--json").json["stored"]["equal"]


def test_the_rows_of_an_evaluation_are_replayed_as_well(run, place):  # noqa: F811
    words = ("--checkpoint", "1", "--split", "validation", "--max-rows", "9", "--sample", "0.9", "--json")
    done = vlmrl(run, place, "eval", run.id, *words)
    rows = Path(done.json["evaluations"][0]["folder"]) / layout.EVAL_ROWS
    replayed = vlmrl(run, place, "reward-check", rows, "--replay")
    assert replayed.code == 0 and "episodes equal what is stored" in replayed.out, replayed


def test_grey_pictures_are_compared_with_grey_ones(run, place):  # noqa: F811
    done = vlmrl(
        run,
        place,
        "eval",
        run.id,
        "--checkpoint",
        "1",
        "--tools",
        "blank",
        "--max-rows",
        "9",
        "--sample",
        "0.9",
        "--json",
    )
    assert done.code == 0, done.err
    rows = Path(done.json["evaluations"][0]["folder"]) / layout.EVAL_ROWS
    turns = [t for text in pq.read_table(rows)["turns"].to_pylist() for t in json.loads(text)["turns"]]
    assert any(turn["media"] for turn in turns)
    assert vlmrl(run, place, "reward-check", rows, "--replay").code == 0


@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        ('f"call {self.count}"', 'f"call {self.count + 1}"', "call 2"),
        ("28 * (1 + x % 2)", "14 * (1 + x % 2)", "pictures"),
        ('ValueError("five', 'ValueError("six', "six"),
        ('f"seed {seed}"', 'f"grain {seed}"', "grain"),
        ("self.count += 1\n", "self.count += 1\n        import os; os._exit(3)\n", "its process ended (exit 3)"),
    ],
)
def test_a_difference_is_shown_with_its_place_and_the_change_of_the_code(run, place, old, new, seen):  # noqa: F811
    assert old in CODE
    (place / "wild.py").write_text(CODE.replace(old, new, 1))
    try:
        done = vlmrl(run, place, "reward-check", run.id, "--replay")
        as_json = vlmrl(run, place, "reward-check", run.id, "--replay", "--json")
        assert as_json.out, as_json.err
        report = json.loads(as_json.out)
    finally:
        (place / "wild.py").write_text(CODE)
    assert done.code == 3, done
    assert "environment of digits has changed since the run: code" in done.out + done.err
    assert report["changed"] == {"digits": ["code"]} and report["equal"] < report["episodes"]
    first = report["first"]
    place_of = (first["turn"], first["tool"])
    assert "step 1, row " in first["where"] and place_of in (
        [(0, "reset")] if seen == "grain" else [(2, "look"), (4, "look")]
    )
    assert seen in first["now"] and first["stored"] != first["now"]
    assert first["where"] in done.out and "stored: " in done.out and seen in done.out


def test_a_stored_observation_that_was_changed_is_a_difference(run, place, tmp_path):  # noqa: F811
    path = run.rollout_files()[1]
    before = path.read_bytes()
    table = pq.read_table(path)
    turns = table["turns"].to_pylist()
    row = next(i for i, text in enumerate(turns) if len(json.loads(text)["turns"]) > 2)
    content = json.loads(turns[row])
    content["turns"][2]["text"] += "!"
    turns[row] = json.dumps(content)
    index = table.schema.get_field_index("turns")
    pq.write_table(table.set_column(index, table.schema.field(index), [turns]), path)
    try:
        done = vlmrl(run, place, "reward-check", run.id, "--replay", "--steps", "2", "--json")
    finally:
        path.write_bytes(before)
    report = json.loads(done.out)
    assert done.code == 3 and report["equal"] == report["episodes"] - 1 and report["changed"] == {"digits": []}
    assert report["first"]["turn"] == 2 and report["first"]["stored"].endswith("!")


def test_what_cannot_be_replayed_is_refused_in_words(run, place):  # noqa: F811
    done = vlmrl(run, place, "reward-check", run.id, "--replay", "--probe")
    assert done.code == 2 and "--probe" in done.err and "without --replay" in done.err


def test_the_report_shows_turns_by_author_and_can_show_those_with_errors_or_at_a_limit_alone(run, place, tmp_path):  # noqa: F811
    done = vlmrl(run, place, "report", run.id, "-o", tmp_path / "r.html")
    assert done.code == 0, done.err
    page = (tmp_path / "r.html").read_text()
    samples = [s for n in range(3) for g in run.read_rollouts(n) for s in g.samples]
    failed = sum(any(turn.errors for turn in s.turns) for s in samples)
    limited = sum(s.ending in EPISODE_LIMITS for s in samples)
    assert failed and limited, "both filters have something to show"
    for words in (
        f"all responses on this page ({len(samples)})",
        f"tool errors ({failed})",
        f"limit reached ({limited})",
    ):
        assert words in page, words
    assert page.count('class="sample tool-errors') == failed and page.count('limit-reached">') == limited + 1
    own = [part for s in samples for part in s.trajectory.segments]
    assert page.count('class="turn trained"') == sum(part.trained for part in own)
    assert page.count('class="turn"') == sum(not part.trained for part in own)
    assert "calls <bdi>look(" in page and "most tool errors" in page and "<script" not in page
