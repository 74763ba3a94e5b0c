from __future__ import annotations

import csv
import json
import math
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlmrl.errors import DataError, RecipeError, RewardError
from vlmrl.reward_check import response_tables
from vlmrl.reward_check.rescore import named_rewards, profile_rewards, scan_saved
from vlmrl.reward_check.response_tables import is_table, open_table
from vlmrl.reward_check.run import RewardQuestion, check_rewards
from vlmrl.rewards.base import combine, split_result
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import RewardInput

ROWS = [
    {"response": 'a, b\n"c"', "ground_truth": "1", "group": "p", "step": 0, "hint": "x"},
    {"response": "", "ground_truth": "0", "group": "p", "step": 0, "hint": None},
    {"response": "\u00e9\u4e2d", "ground_truth": "1", "group": "q", "step": 1, "hint": "z"},
]
FUNGI = "1;Boletaceae;Boletus;Boletales;B. edulis;Boletaceae;Boletus;Boletales;B. edulis"
APART = "0;Boletaceae;Boletus;Boletales;B. edulis;Boletaceae;Suillus;Boletales;S. luteus"
GOOD = (
    "<think><order>Boletales; Boletales</order><family>Boletaceae; Boletaceae</family>"
    "<genus>Boletus; {}</genus></think><answer>{}</answer>"
)


def write(path, rows):
    names = list(rows[0])
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows(["" if v is None else v for v in row.values()] for row in rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def scored(tmp_path, rows, source, kind=".jsonl", **options):
    (tmp_path / "r.py").write_text(source)
    saved = open_table(write(tmp_path / f"rows{kind}", rows), **options)
    return saved, scan_saved(saved, [named_rewards(saved, f"{tmp_path}/r.py:score", args={}, weights=None)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".json", ".parquet"])
def test_every_kind_of_file_gives_the_same_inputs_in_order(kind, tmp_path):
    source = "def score(x): return {'length': len(x.response), 'hint': float(x.columns['hint'] == 'z')}\n"
    saved, found = scored(tmp_path, ROWS, source, kind)
    assert found.sides[0].parts["length"].tolist() == [8.0, 0.0, 2.0]
    assert found.sides[0].parts["hint"].tolist() == [0.0, 0.0, 1.0]
    facts = found.facts
    assert facts.rows_N.tolist() == [0, 1, 2] and facts.chars_N.tolist() == [8, 0, 2]
    assert facts.steps_N.tolist() == [0, 0, 1] and facts.prompts[2] == "q"
    assert facts.groups_N[0] == facts.groups_N[1] != facts.groups_N[2]
    picked = saved.pick([2, 0])
    assert [picked[i].input.response for i in (0, 2)] == [ROWS[0]["response"], ROWS[2]["response"]]
    assert {**picked[2].input.truth} == {"answer": "1", "ground_truth": "1"}, "as in training, and as trainers write it"
    places = {
        ".jsonl": "rows.jsonl:3",
        ".csv": "rows.csv:5",
        ".json": "rows.json row 2",
        ".parquet": "rows.parquet row 2",
    }
    assert picked[2].where.endswith(places[kind])


@pytest.mark.parametrize(
    ("row", "roles"),
    [
        ({"input": "p", "output": "r", "gts": "1", "score": 0.5, "step": 3}, "output gts score step input"),
        ({"problem": "p", "prediction": "r", "answer_im": "1", "answer": "0"}, "prediction answer_im problem"),
        ({"prompt": "p", "completion": "r", "solution": "1", "reward": 1}, "completion solution reward prompt"),
        ({"data_source": "d", "solution_str": "r", "reward_model": {"ground_truth": "1"}}, "solution_str reward_model"),
    ],
)
def test_the_spellings_of_verl_easyr1_and_trl_are_recognised(row, roles, tmp_path):
    found = response_tables.map_roles(list(row), {}, "here")
    assert set(found.values()) == set(roles.split())
    assert found["response"] == roles.split()[0] and found["ground_truth"] == roles.split()[1]


def test_columns_are_named_by_hand_and_wrong_names_are_told(tmp_path):
    rows = [{"mine": "x", "theirs": "1"}]
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match="no column of responses; the table has: mine, theirs"):
        open_table(path)
    named = open_table(path, columns={"response": "mine", "ground_truth": "theirs"})
    assert named.pick([0])[0].input.response == "x"
    with pytest.raises(DataError, match="no column `mien`") as error:
        open_table(path, columns={"response": "mien"})
    assert "did you mean `mine`" in str(error.value)
    with pytest.raises(DataError, match="--columns names `responce`"):
        open_table(path, columns={"responce": "mine"})


def test_rows_that_cannot_be_read_are_all_named_and_left_out_on_request(tmp_path):
    lines = [json.dumps(ROWS[0]), "{not json", "", '["a list"]', '{"response": null}', "\xff\xfe", json.dumps(ROWS[2])]
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\n".join(lines).encode("latin-1"))
    (tmp_path / "r.py").write_text("def score(x): return len(x.response)\n")
    question = RewardQuestion(reward=f"{tmp_path}/r.py:score")
    with pytest.raises(DataError) as error:
        check_rewards(open_table(path), question)
    told = str(error.value)
    assert "4 of 6 rows cannot be read" in told
    for place, why in (
        (2, "not JSON"),
        (4, "a row is ['a list'], not an object"),
        (5, "is None, not text"),
        (6, "not JSON"),
    ):
        assert f"rows.jsonl:{place}: " in told and why in told
    kept = check_rewards(open_table(path), RewardQuestion(reward=question.reward, keep_going=True))
    assert kept.report["samples"] == 2 and kept.report["broken"]["number"] == 4
    assert kept.facts.rows_N.tolist() == [0, 5] and kept.facts.places_N.tolist() == [1, 7]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("response,ground_truth\na,1,2\nb,1\n", "3 cells, the header has 2"),
        ('response,ground_truth\n"a,1\n', "not CSV"),
        ("response,response\na,1\n", "repeated column name"),
        ("", "the header is empty"),
    ],
)
def test_broken_csv_is_told_with_its_line(text, words, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    (tmp_path / "r.py").write_text("def score(x): return 1.0\n")
    with pytest.raises(DataError, match=words):
        check_rewards(open_table(path), RewardQuestion(reward=f"{tmp_path}/r.py:score"))


def test_taxonrls_string_and_typed_fields_are_the_same_truth(tmp_path):
    pytest.importorskip("vlmrl.tasks.taxonrl.domains")
    texts = [GOOD.format("Boletus", "0.9"), GOOD.format("Suillus", "0.1")]
    string = [{"response": t, "ground_truth": g} for t, g in zip(texts, (FUNGI, APART), strict=True)]
    typed = [
        {"same": True, "order": ["Boletales"] * 2, "family": ["Boletaceae"] * 2, "genus": ["Boletus"] * 2},
        {"same": False, "order": ["Boletales"] * 2, "family": ["Boletaceae"] * 2, "genus": ["Boletus", "Suillus"]},
    ]
    forms = {
        "a.jsonl": string,
        "b.jsonl": [{"response": t, "truth": g} for t, g in zip(texts, typed, strict=True)],
        "c.csv": [{"response": t, "ground_truth": json.dumps(g)} for t, g in zip(texts, typed, strict=True)],
        "d.csv": [
            {"response": t, **{k: json.dumps(v) for k, v in g.items()}} for t, g in zip(texts, typed, strict=True)
        ],
        "e.parquet": [{"response": t, **g} for t, g in zip(texts, typed, strict=True)],
    }
    values = {}
    for name, rows in forms.items():
        saved = open_table(write(tmp_path / name, rows), task="fungi")
        own = profile_rewards(saved, "default", args={}, weights=None)
        assert own[saved.sources[0]].spec.name == "taxonomy"
        values[name] = scan_saved(saved, [own]).sides[0].values_N.tolist()
    assert len({tuple(v) for v in values.values()}) == 1
    assert min(values["a.jsonl"]) > 0.99  # 0.2 + 0.4 * (1 - 0.1^2) + 0.4


def test_a_truth_that_breaks_its_layout_is_named_and_taken_as_it_is_by_the_published_reward(tmp_path):
    pytest.importorskip("vlmrl.tasks.taxonrl.domains")
    rows = [{"response": GOOD.format("Boletus", "0.9000"), "ground_truth": g} for g in (FUNGI, "1;sameSpecies;Boletus")]
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=r"rows.jsonl:2: the fungi ground truth .* has 3 fields, not 9"):
        check_rewards(open_table(path, task="fungi"), RewardQuestion())
    checked = check_rewards(open_table(path, task="fungi", lenient=True), RewardQuestion(reward="profile:taxonrl"))
    assert checked.report["samples"] == 2 and "1 ground truth is not in the task's form" in checked.report["notes"][0]
    assert not math.isnan(checked.scores.values_N[1])


CONTRADICTORY = [
    ("1;sameSpecies;Parus;Paridae;Passeriformes;Parus;Paridae;Passeriformes", True, 0, ["Parus", "Parus"]),
    ("0;sameGenus;Parus;Paridae;Passeriformes;Poecile;Paridae;Passeriformes", False, 1, ["Parus", "Poecile"]),
    ("0;sameFamily;Parus;Paridae;Passeriformes;Parus;Paridae;Passeriformes", False, 2, ["Parus", "Parus"]),
]
"""Ground truths as TaxonRL writes them, and what they say of `same`, the distance and the genera. The last two
contradict themselves."""


@pytest.mark.parametrize("typed", [False, True], ids=["text", "typed"])
@pytest.mark.parametrize("variant", [None, "im_concrete"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["sound first", "contradictory first"])
def test_truths_that_contradict_themselves_are_scored_by_the_published_reward_and_counted(
    tmp_path, order, variant, typed
):
    rows = []
    for at in order:
        text, same, distance, genera = CONTRADICTORY[at]
        truth = {"ground_truth": text}
        if typed:
            truth = {
                "same": same,
                "distance": distance,
                "genus": genera,
                "family": ["Paridae"] * 2,
                "order": ["Passeriformes"] * 2,
            }
        rows.append({"response": "<think>a</think><answer>0.9</answer>", **truth})
    path = write(tmp_path / "rows.jsonl", rows)
    table = open_table(path, task="bird", variant=variant, lenient=True)
    checked = check_rewards(table, RewardQuestion(reward="profile:taxonrl"))
    published = load_reward("taxonrl", args={"function": checked.report["rewards"]["rows"]["args"]["function"]})
    expected = [
        combine(
            split_result(published.fn(RewardInput(row["response"], {"ground_truth": CONTRADICTORY[at][0]})))[0],
            published.weights,
        )[0]
        for row, at in zip(rows, order, strict=True)
    ]
    assert checked.scores.values_N.tolist() == expected and len({*expected}) > 1
    assert checked.report["doubts"] == {"number": 2, "contradictions": 2}
    (note,) = checked.report["notes"]
    assert note.startswith("2 ground truths contradict themselves, and were scored as they are; ")
    assert "contradicts itself: `distance` is" in note
    with pytest.raises(DataError, match="2 of 3 rows cannot be read"):
        check_rewards(open_table(path, task="bird", variant=None), RewardQuestion())


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        ({"same": "yes"}, "`same` is 'yes', not true or false"),
        ({"same": True, "order": ["A"]}, "`order` is"),
        ("{broken", "looks like JSON and is not"),
        (None, "there is no ground truth"),
    ],
)
def test_a_broken_truth_is_never_a_zero(truth, words, tmp_path):
    pytest.importorskip("vlmrl.tasks.taxonrl.domains")
    rows = [{"response": "x", "truth": {"same": True}}, {"response": "x", "truth": truth}]
    with pytest.raises(DataError, match=words):
        check_rewards(open_table(write(tmp_path / "rows.jsonl", rows), task="fungi"), RewardQuestion())


def test_what_is_missing_is_told(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(RewardError, match="not recorded which reward"):
        check_rewards(open_table(path), RewardQuestion())
    with pytest.raises(RecipeError, match="unknown task `fungus`"):
        open_table(path, task="fungus")
    with pytest.raises(DataError, match="without a task"):
        open_table(path, variant="im")
    with pytest.raises(DataError, match="no such file"):
        open_table(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="the table has no rows"):
        open_table(tmp_path / "empty.jsonl")
    (tmp_path / "torn.jsonl").write_bytes(b"{\n\xff\xfe\n")
    with pytest.raises(DataError, match="no row that can be read; the first one: not JSON"):
        open_table(tmp_path / "torn.jsonl")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        open_table(tmp_path / "x.parquet")


def test_a_path_that_is_no_readable_file_is_told(tmp_path, monkeypatch):
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    with pytest.raises(DataError, match=r"cannot be read: Too many levels of symbolic links"):
        open_table(tmp_path / "loop.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="is a named pipe"):
        open_table(tmp_path / "pipe.jsonl")
    path = write(tmp_path / "rows.jsonl", ROWS)

    def refuse(*args, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        open_table(path)


def test_columns_of_one_name_are_refused(tmp_path):
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["response", "response"])
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(DataError, match="several columns `response`"):
        open_table(tmp_path / "t.parquet")


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"step": 1e12, "num_tokens": 1e30}, {"step": float("inf")}, {"group": "\udfff"}])
def test_a_cell_that_no_run_has_does_not_end_the_reading(tmp_path, more):
    rows = [{"response": "\ud800 half", "ground_truth": "1", "group": "g", **more}, {"response": "b", "group": "g"}]
    (tmp_path / "r.py").write_text("def score(x): return float(len(x.response))\n")
    saved = open_table(write(tmp_path / "rows.jsonl", rows))
    facts = check_rewards(saved, RewardQuestion(reward=f"{tmp_path}/r.py:score")).facts
    assert facts.steps_N.tolist() == [0, 0] and facts.tokens_N.tolist() == [0, 0]


def test_a_stored_score_is_what_a_reward_is_compared_with(tmp_path):
    rows = [
        {"response": "ab", "ground_truth": "1", "score": 2.0},
        {"response": "abc", "ground_truth": "1", "score": None},
    ]
    (tmp_path / "r.py").write_text("def score(x): return len(x.response)\n")
    saved = open_table(write(tmp_path / "rows.jsonl", rows))
    report = check_rewards(saved, RewardQuestion(reward=f"{tmp_path}/r.py:score")).report
    assert report["diff"]["names"]["first"] == "as stored" and report["diff"]["compared"] == 1
    assert report["diff"]["value"]["moved"] == 0.0 and report["diff"]["groups"] is None
    assert report["dead_groups"] is None and report["groups"] is None


@pytest.mark.slow
def test_rewards_of_other_trainers_see_the_columns(tmp_path):
    rows = [{"response": "4", "ground_truth": "4", "data_source": "sums", "level": 3}]
    verl = (
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    ok = data_source == 'sums' and extra_info['level'] == 3\n"
        "    return {'score': float(solution_str == ground_truth), 'ok': float(ok)}\n"
    )
    _, found = scored(tmp_path, rows, verl)
    assert found.sides[0][0].parts == {"score": 1.0, "ok": 1.0}
    easyr1 = (
        "def score(reward_inputs):\n"
        "    return [{'overall': float(r['response'] == r['ground_truth'])} for r in reward_inputs]\n"
    )
    _, found = scored(tmp_path, rows, easyr1)
    assert found.sides[0][0].value == 1.0
    trl = "def score(completions, level, **kw): return [float(n) for n in level]\n"
    _, found = scored(tmp_path, rows, trl)
    assert found.sides[0][0].value == 3.0


@pytest.mark.slow
def test_a_reward_is_given_the_truth_the_prompt_and_the_group_under_the_tables_own_names(tmp_path):
    """As in training, where every column is an argument: TRL's rewards name `solution`, `problem`, `uid`."""
    trl = "def score(completions, solution, problem, uid, **kw): return [float(s['a']) for s in solution]\n"
    row = {"response": "4", "solution": {"a": 4}, "problem": "2+2", "uid": "u", "score": 1.0, "step": 3}
    _, found = scored(tmp_path, [row], trl)
    assert found.sides[0][0].value == 4.0
    ours = "def score(x): return float(sorted(x.columns) == ['problem', 'solution', 'uid'] and x.truth['a'] == 4)\n"
    _, found = scored(tmp_path, [row], ours)
    assert found.sides[0][0].value == 1.0


def test_a_truth_in_braces_is_a_text_where_no_task_wants_fields(tmp_path):
    rows = [{"response": "{1, 2}", "answer": "{1, 2}"}]
    _, found = scored(tmp_path, rows, "def score(x): return float(x.response == x.truth['ground_truth'])\n")
    assert found.sides[0][0].value == 1.0


def test_rows_without_a_group_are_groups_of_their_own(tmp_path):
    rows = [{"response": "4", "answer": "4", "uid": uid} for uid in ("a", None, "a", None)]
    saved, found = scored(tmp_path, rows, "def score(x): return 1.0\n")
    a, one, b, other = found.facts.groups_N.tolist()
    assert a == b and len({a, one, other}) == 3 and saved.grouped
    assert [found.facts.prompts[i] for i in range(4)] == ["a", None, "a", None]


def test_csv_with_another_separator_is_told(tmp_path):
    for mark, name in ((";", "semicolons"), ("\t", "tabs")):
        (tmp_path / "a.csv").write_text(mark.join(("response", "answer")) + "\n" + mark.join("45") + "\n")
        with pytest.raises(DataError, match="the header is one cell") as error:
            open_table(tmp_path / "a.csv")
        assert error.value.hint == f"its cells are separated by {name}: save it with commas"


def test_what_is_a_table(tmp_path):
    assert is_table(write(tmp_path / "a.jsonl", ROWS)) and is_table(write(tmp_path / "a.parquet", ROWS))
    assert is_table(tmp_path / "not-there.csv") and not is_table(tmp_path / "not-there.parquet")
    assert not is_table(tmp_path)


def trl_rows():
    return [
        {"step": step, "prompt": f"question {n}", "completion": said, "form_reward": 1.0,
         "right_reward": float(said == "a"), "advantage": 0.0, "solution": "a"}
        for step in (3, 12) for n in range(2) for said in ("a", "b")
    ]  # fmt: skip


def test_completions_of_trl_have_groups_and_the_rewards_that_were_stored(tmp_path):
    path = write(tmp_path / "completions.parquet", trl_rows())
    (tmp_path / "r.py").write_text("def score(x):\n    return float(x.response == x.truth['answer'])")
    report = check_rewards(open_table(path), RewardQuestion(f"{tmp_path}/r.py:score")).report
    assert (report["groups"], report["steps"], report["first_step"]) == (4, [3, 12], 0)
    assert report["diff"]["names"]["first"] == "as stored"
    assert report["diff"]["value"]["first"] == 1.5 and report["diff"]["value"]["second"] == 0.5
    assert any("sum of form_reward, right_reward" in note for note in report["notes"])


def test_equal_prompts_with_images_are_no_group(tmp_path):
    rows = [{**row, "images": "a.png"} for row in trl_rows()]
    assert not open_table(write(tmp_path / "rows.jsonl", rows)).grouped


def test_a_folder_with_a_file_per_step_is_one_table(tmp_path):
    for step in (2, 10):
        rows = [{"input": "q", "output": said, "gts": "a", "score": 1.0, "step": step} for said in "ab"]
        write(tmp_path / f"{step}.jsonl", rows)
    (tmp_path / "10.jsonl").write_text((tmp_path / "10.jsonl").read_text() + "{}\n")
    assert is_table(tmp_path)
    saved = open_table(tmp_path, lenient=True)
    decoded = [saved.reader.decode(chunk) for chunk in saved.reader.chunks()]
    assert [d.facts.steps_N.tolist() for d in decoded] == [[2, 2], [10, 10]]
    assert len({int(g) for d in decoded for g in d.facts.groups_N}) == 2
    assert saved.reader.where(decoded[1].facts, 1).endswith("10.jsonl:2")
    assert [b.where for b in decoded[1].broken] == [f"{tmp_path}/10.jsonl:3"]
