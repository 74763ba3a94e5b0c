"""The task agent_search: drawn worlds and their passages, steps graded by hand, rows and rewards as published."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Template
from PIL import Image
from task_tables import prepare, rows_of, sizes_of

from vlmrl.data.dataset_writer import damage_of
from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError, RewardError
from vlmrl.recipe.schema import Data
from vlmrl.reward_check.probe import probe_reward
from vlmrl.rewards.base import UNSCORED, RewardSpec
from vlmrl.search.tool import Search
from vlmrl.tasks import make_task
from vlmrl.tasks.agent_search.rewards import WEIGHTS, score, score_step_as_published
from vlmrl.tasks.agent_search.rows import PASSAGES_FILE, STEPS, make_world, read_row
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import Call, RewardInput, Row, Turn

THINK = "<think>I look.</think>"
CALLED = (Turn("assistant", "", calls=(Call("search", {"query": "x"}),)), Turn("tool", "1. x"))


def episode(last: str, truth: dict[str, Any], *, calls: int = 1, errors: int = 0) -> RewardInput:
    tool = Turn("tool", "1. x", errors=errors)
    turns = (*(CALLED[0], tool) * calls, Turn("assistant", last))
    return RewardInput(last, truth, turns=turns if calls else ())


def total(spec: RewardSpec, x: RewardInput) -> float:
    parts = spec(x)
    return sum(spec.weights[name] * (parts[name] or 0.0) for name in spec.weights)


@pytest.mark.parametrize(
    ("answer", "accepted", "right", "exact"),
    [
        ("the Eiffel Tower.", ["eiffel tower"], 1.0, 1.0),
        ("Tower", ["Eiffel Tower", "big tower of iron"], 2 / 3, 0.0),
        ("very very big", ["very very big"], 1.0, 1.0),
        ("no", ["yes"], 0.0, 0.0),
        ("", ["yes"], 0.0, 0.0),
        ("...", ["???"], 0.0, 0.0),  # both are nothing without marks
        ("???", ["???"], 1.0, 1.0),
        ("The", ["a"], 0.0, 0.0),
        ("Franklin\nRoosevelt", ["Franklin Roosevelt"], 1.0, 1.0),
        ("<|im_end|> yes", ["yes"], 0.5, 0.0),
    ],
)
def test_an_answer_counts_by_the_words_of_the_best_accepted_one(answer, accepted, right, exact):
    parts = score(RewardInput(f"{THINK}<answer>{answer}</answer>", {"answer": accepted}))
    assert (parts["right"], parts["exact"]) == (pytest.approx(right), exact)
    assert parts["format"] == float(bool(answer))


@pytest.mark.parametrize(
    ("response", "right", "form"),
    [
        (f"{THINK}<search>mayor of Paris</search>", 1.0, 1.0),
        (f"{THINK}<search>Paris mayor</search>", 0.8, 1.0),
        (f"{THINK}<search>weather</search>", 0.0, 1.0),
        ("<search>mayor of Paris</search>", 1.0, 0.0),
        (f"{THINK}<answer>mayor of Paris</answer>", 0.0, 0.0),
        (f"{THINK}<search>mayor of Paris</search><answer>x</answer>", 1.0, 0.0),
        (f"{THINK}<search>x</search><search>mayor of Paris</search>", 0.0, 0.0),
        (f"{THINK}<search><search>mayor of Paris</search></search>", 0.0, 0.0),
        (f"{THINK}mayor of Paris", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_a_query_counts_by_its_words_and_only_in_its_tags(response, right, form):
    parts = score(RewardInput(response, {"step": "search", "query": "mayor of Paris"}))
    assert (parts["right"], parts["format"]) == (pytest.approx(right), form), parts


@pytest.mark.parametrize(
    ("truth", "told"),
    [
        ({"step": "dance", "answer": "x"}, "`step` is"),
        ({"step": "search"}, "`query` is '?None"),
        ({"step": "search", "query": " "}, "`query` is"),
        ({"answer": []}, "not a text or a list"),
        ({"answer": [" "]}, "not a text or a list"),
    ],
)
def test_a_broken_truth_is_a_bug_of_the_row(truth, told):
    with pytest.raises(RewardError, match=told):
        score(RewardInput("<answer>x</answer>", truth))
    assert make_task("agent_search", {"name": "x"}).validate(truth)


WORDS = ("Paris", "river", "Miren", "1412", "the", "<think>", "</think>", "</answer>", "<|im_end|>", "<search>")
TEXT = st.lists(st.sampled_from(WORDS)).map(" ".join)
TAGS = st.sampled_from(("<answer>{}</answer>", "<search>{}</search>", "{}", "<answer>{}", "<answer></answer>{}"))


@given(TEXT, TAGS, st.booleans(), st.integers(0, 4), st.sampled_from((0, 1)), st.booleans(), st.data())
@settings(max_examples=300, deadline=None)
def test_a_wrong_answer_with_calls_never_beats_a_right_one_without(words, tag, thinks, calls, errors, thought, data):
    accepted = ["Miren", "river Miren"]
    spec = load_reward("agent_search", args={"thought": "required" if thought else "optional"})
    last = (THINK if thinks else "") + data.draw(st.sampled_from((tag, f"<think>{tag}</think>"))).format(words)
    wrong = episode(last, {"answer": accepted}, calls=calls, errors=errors)
    right = data.draw(st.sampled_from(accepted))
    value, best = total(spec, wrong), total(spec, RewardInput(f"<answer>{right}</answer>", {"answer": accepted}))
    assert 0.0 <= value <= 1.0 and 0.9 - 1e-9 <= best <= 1.0
    assert value < best - 0.15 or spec(wrong)["exact"] == 1.0
    # Calls pay nothing: the same last turn without them earns the same.
    assert value == total(spec, RewardInput(last, {"answer": accepted}))


@given(TEXT, TEXT.filter(bool), TAGS, st.sampled_from(STEPS))
@settings(max_examples=300, deadline=None)
def test_every_reward_is_within_its_bounds_on_any_text(said, truth, tag, step):
    row = {"step": step, "answer": [truth], "query": truth}
    for name in ("agent_search", "rllava_agent_search"):
        spec = load_reward(name)
        assert 0.0 <= total(spec, RewardInput(tag.format(said), row)) <= 1.0
    assert 0.0 <= total(load_reward("rllava_agent_search_episodes"), episode(tag.format(said), row)) <= 2.2


def test_the_weights_leave_no_room_between_wrong_and_right():
    assert sum(WEIGHTS.values()) == pytest.approx(1.0)
    assert WEIGHTS["right"] + WEIGHTS["format"] < WEIGHTS["right"] + WEIGHTS["exact"]


@pytest.mark.parametrize(
    ("step", "truth", "response", "accuracy", "form"),
    [
        ("answer", "very very big", f"{THINK}<answer>very very big</answer>", 2 / 3, 1.0),  # not its own equal
        ("answer", "red", "the red", 1.0, 0.0),  # no tag: the whole response
        ("answer", "the red one", "<answer>the red\none</answer>", 0.4, 0.0),  # a line break hides the tag
        ("answer", "red", f"{THINK}<answer>red</answer> or not", 1.0, 1.0),  # text behind it
        ("answer", "red", f"{THINK}<search>red</search>", 0.0, 1.0),
        ("search", "mayor of Paris", f"{THINK}<search>mayor of Paris</search>", 1.0, 1.0),
        ("search", "mayor of Paris", f"{THINK}<search>Paris</search>", 0.5, 1.0),
        ("search", "mayor of Paris", f"{THINK}<search>the weather of Rome</search>", 0.0, 1.0),  # 1/3 is below 0.5
        ("search", "mayor of Paris", "mayor of Paris", 1.0, 0.0),
        ("search", "mayor of Paris", f"{THINK}<answer>mayor of Paris</answer>", 0.0, 1.0),
        ("answer", "red", "", 0.0, 0.0),
        ("answer", "red", f"{THINK * 2}<answer>red</answer>", 1.0, 0.0),
    ],
)
def test_the_published_reward_of_steps_has_its_flaws(step, truth, response, accuracy, form):
    row = {"step": step, "answer": [truth], "query": truth}
    found = score_step_as_published(RewardInput(response, row))
    assert (found["accuracy"], found["format"]) == (pytest.approx(accuracy), form)


def test_the_published_reward_of_episodes_pays_a_call_beside_a_wrong_answer():
    spec = load_reward("rllava_agent_search_episodes")

    def earned(answer: str, calls: int, errors: int = 0) -> float:
        last = f"{THINK}<answer>{answer}</answer>"
        return total(spec, episode(last, {"answer": ["red"]}, calls=calls, errors=errors))

    assert earned("blue", 1) == pytest.approx(1.4) and earned("red", 0) == pytest.approx(1.0)
    assert earned("red", 3) == pytest.approx(2.2) and earned("blue", 1, errors=1) == pytest.approx(0.2)


def drawn(tmp_path: Path, rows: int = 80, **options: Any) -> Any:
    prepared = prepare("agent_search", tmp_path, synthetic=rows, side=56, towns=20, **options)
    return prepared, open_dataset(Data(path=str(prepared.path), task="agent_search"))


def passages(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / PASSAGES_FILE).read_text("utf-8").splitlines()]


def test_no_question_about_an_emblem_is_in_two_splits(tmp_path):
    _, dataset = drawn(tmp_path)
    towns = {split: {row.truth["queries"][0] for row in dataset.rows(split)} for split in dataset.splits}
    assert not towns["train"] & towns["test"] and not towns["train"] & towns["validation"]
    assert not towns["validation"] & towns["test"] and all(len(own) >= 2 for own in towns.values())
    levels = Counter(row.truth["level"] for row in dataset.rows("train"))
    assert levels.keys() == {"simple", "hard"} and min(levels.values()) > 20
    assert sizes_of(dataset.info) == {"train": 80, "validation": 20, "test": 40}


def test_the_passages_hold_every_answer_and_the_emblems_are_told_apart():
    for seed in range(5):
        towns, others = make_world(72, seed)
        words = [tuple(sorted(town.queries[0].split())) for town in towns]
        assert len(set(words)) == 72 and len(others) == 12
        names = [title for town in towns for title, _ in town.passages]
        assert len(set(names)) == len(names)
        for town in towns:
            text = dict(enumerate(text for _, text in town.passages))
            for question, answers, place in town.facts.values():
                assert answers[0] in text[place] and answers[0] not in question
                assert not place or answers[0] not in text[0], "a hard question needs two passages"
        badges = {badge.rpartition("badge is a ")[2] for _, badge in others}
        assert not badges & {town.queries[0].partition(": ")[2] + "." for town in towns}
    assert make_world(20, 1)[0][0].name != make_world(20, 2)[0][0].name and make_world(20, 1) == make_world(20, 1)


def test_the_passages_are_a_file_of_the_dataset(tmp_path):
    prepared, _ = drawn(tmp_path)
    rows = passages(prepared.path)
    assert len(rows) == 20 * 4 + 12 and len({row["id"] for row in rows}) == len(rows)
    assert set(rows[0]) == {"id", "title", "text"} and PASSAGES_FILE in prepared.info["files"]
    assert drawn(tmp_path)[0].outcome == "up to date"
    found = asyncio.run(Search(corpus=str(prepared.path / PASSAGES_FILE)).search("chess club"))
    assert found.text.count("chess club") >= 4 and len([*prepared.path.glob(f"{PASSAGES_FILE}.*")]) >= 1
    with pytest.raises(DataError, match="--force"):
        drawn(tmp_path, seed=1)
    assert drawn(tmp_path, seed=1, force=True)[0].outcome == "replaced" and passages(prepared.path) != rows
    (prepared.path / PASSAGES_FILE).write_text("{}\n")
    assert PASSAGES_FILE in str(damage_of(prepared.path))
    (prepared.path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"notes\.txt"):
        drawn(tmp_path, force=True)
    assert (prepared.path / "notes.txt").exists()


def test_steps_of_drawn_rows_show_the_steps_before(tmp_path):
    _, dataset = drawn(tmp_path, stepwise=True)
    task, seen = make_task("agent_search", dataset.info), Counter[tuple[str, int]]()
    for row in dataset.rows("train"):
        context, step = str(row.columns["context"]), row.truth["step"]
        seen[step, context.count("<search>")] += 1
        assert context.count("<search>") == context.count("<information>")
        queries = re.findall("<search>(.*?)</search>", context)
        assert queries == row.truth["queries"][: len(queries)]
        parts = score(RewardInput(task.correct_response(row, random.Random(0)), row.truth))
        assert (parts["right"], parts["exact"], parts["format"]) == (1.0, 1.0, 1.0)
        if step == "answer":
            assert row.truth["answer"][0] in context
    assert seen.keys() == {("search", 0), ("search", 1), ("answer", 1), ("answer", 2)}


def test_a_demonstration_looks_up_what_the_answer_needs(tmp_path):
    prepared, dataset = drawn(tmp_path)
    task = make_task("agent_search", dataset.info, "direct")
    search = Search(corpus=str(prepared.path / PASSAGES_FILE))
    for row in dataset.rows("train"):
        *calls, (last,) = task.correct_turns(row, random.Random(0))
        shown = ""
        for turn, query in zip(calls, row.truth["queries"], strict=True):
            assert [call.arguments for call in turn] == [{"query": query}]
            # What is asked for next was shown before, or is in the picture.
            assert not shown or query.split(" ", 1)[1] in shown
            shown += asyncio.run(search.search(query)).text
        answer = row.truth["answer"][0]
        assert last == f"<answer>{answer}</answer>" and answer in shown
        assert score(RewardInput(str(last), row.truth), thought="optional")["exact"] == 1.0


def write_images(folder: Path) -> None:
    for name in ("a", "b"):
        Image.new("RGB", (30, 20), "red" if name == "a" else "blue").save(folder / f"{name}.png")


MAT = [
    {"problem": "<image> Who designed it?", "image_path": "a.png",
     "solution": "<think>t</think><search> Eiffel Tower\ndesigner </search>"},
    {"problem": "Who designed it?\n<think>t</think><search>q</search><information>1. x <image></information>",
     "image_path": "a.png", "solution": "<think>t</think><answer>Gustave Eiffel</answer>"},
    {"problem": "What is it?", "image_path": "b.png", "solution": "<think>none</think>"},
]  # fmt: skip


def test_published_rows_become_steps_or_episodes(tmp_path):
    write_images(tmp_path)
    (tmp_path / "rft_agent_search_20.json").write_text(json.dumps(MAT))
    source, options = tmp_path / "rft_agent_search_20.json", {"validation_rows": 0, "max_bad": 0.7}
    rows = rows_of(prepare("agent_search", tmp_path, source, **options, stepwise=True, out=tmp_path / "steps"))
    assert [row.truth["step"] for row in rows] == ["search", "answer"]
    assert rows[0].truth["query"] == "Eiffel Tower designer" and rows[1].truth["answer"] == ["Gustave Eiffel"]
    assert {row.columns["question"] for row in rows} == {"Who designed it?"} and rows[0].columns["context"] == ""
    assert rows[1].columns["context"] == ("<think>t</think><search>q</search><information>1. x  </information>")
    (row,) = rows_of(prepare("agent_search", tmp_path, source, **options))
    assert row.truth == {"answer": ["Gustave Eiffel"]} and row.columns == {
        "question": "Who designed it?", "mark": "<image>"
    }  # fmt: skip
    with pytest.raises(DataError, match="2 of 3 rows are wrong"):
        prepare("agent_search", tmp_path, source, out=tmp_path / "none")


@pytest.mark.parametrize(
    ("problem", "question", "context"),
    [
        ("Who?", "Who?", ""),
        ("<query> Who\nis it? </query>", "Who is it?", ""),
        ("Act in <search> </search>.\n<query>Who?</query>\n<think>t</think><search>q</search>", "Who?",
         "<think>t</think><search>q</search>"),
        ("Who? <think>t</think><query>no</query>", "no", ""),
        ("<query>Who? <think>t</think>", "Who? <think>t</think>", ""),
        ("Who?\n<information>1. <image>x</information>", "Who?", "<information>1.  x</information>"),
    ],
)  # fmt: skip
def test_the_question_of_a_published_problem_is_told_from_its_chain(problem, question, context):
    truth, columns = read_row(True, {"question": problem, "solution": "<answer>x</answer>"}, (0, 0))
    assert (columns["question"], columns["context"]) == (question, context) and truth["answer"] == ["x"]


LONG = [["Some title", ["A sentence.", "Another."]], ["More", ["One."]]]
HOTPOT = {"_id": "5a", "answer": "yes", "question": "Same?", "supporting_facts": [["More", 0]], "context": LONG,
          "type": "comparison", "level": "hard"}  # fmt: skip
WIKI = {"_id": "8b", "type": "compositional", "question": "Whose mother?", "context": LONG,
        "supporting_facts": [["More", 0]], "evidences": [["A", "mother", "B"]], "answer": "Small Heath"}  # fmt: skip
MUSIQUE = {"id": "3hop1__4_5_6", "paragraphs": [{"idx": 0, "title": "T", "paragraph_text": "x"}], "question": "Who?",
           "question_decomposition": [{"id": 1, "question": "q", "answer": "a"}], "answer": "Green",
           "answer_aliases": ["Green Company", "Green"], "answerable": True}  # fmt: skip
TRIVIA = {"question": "who?", "answer": {"aliases": ["B", "A"], "value": "A", "normalized_value": "a"}}
FLASH = {"id": "test_0", "question": "who?", "golden_answers": ["A", "B"], "metadata": {"type": "x"}}


@pytest.mark.parametrize(
    ("name", "row", "truth"),
    [
        ("hotpot_dev.json", HOTPOT, {"answer": ["yes"], "level": "hard"}),
        ("2wiki_dev.json", WIKI, {"answer": ["Small Heath"], "level": "compositional"}),
        ("musique.jsonl", MUSIQUE, {"answer": ["Green", "Green Company"], "level": "3hop"}),
        ("bamboogle.csv", "Question,Answer\nWho was it?,Franklin\n", {"answer": ["Franklin"]}),
        ("flash.jsonl", FLASH, {"answer": ["A", "B"]}),
        ("trivia.jsonl", TRIVIA, {"answer": ["A", "B"]}),
        ("year.jsonl", {"question": "when?", "answer": 1889}, {"answer": ["1889"]}),
    ],
)
def test_questions_of_other_benchmarks_have_no_image(tmp_path, name, row, truth):
    text = row if isinstance(row, str) else json.dumps([row] if name.endswith(".json") else row)
    (tmp_path / name).write_text(text)
    prepared = prepare("agent_search", tmp_path, tmp_path / name, validation_rows=0)
    (read,) = rows_of(prepared)
    assert dict(read.truth) == truth and read.media == () and read.columns["mark"] == ""
    assert "context" not in read.columns


def test_a_table_with_and_without_images_is_cut_for_validation(tmp_path):
    write_images(tmp_path)
    rows = [{"question": f"Who is {n}?", "answer": "x", "image": "a.png" if n < 3 else None} for n in range(60)]
    rows += [{"question": "Who is 59?", "answer": "y", "image": None}, {**rows[5]}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    prepared = prepare("agent_search", tmp_path, tmp_path / "rows.json", validation_rows=4, max_bad=0.1)
    read = {split: rows_of(prepared, split) for split in ("train", "validation")}
    assert len(read["validation"]) == 4 and len(read["train"]) + len(read["validation"]) <= 62
    both = [row.columns["question"] for split in read.values() for row in split]
    assert len(both) - len(set(both)) <= 1  # the two answers to one question may be in two splits
    assert Counter(bool(row.media) for split in read.values() for row in split)[True] == 3


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({"question": " <image> ", "answer": "x"}, "the question is"),
        ({"question": "<search>q</search>", "answer": "x"}, "the question is"),  # a chain without a question
        ({"question": "who?", "answer": None}, "the answer is"),
        ({"question": "who?", "solution": "<answer> </answer>"}, "the answer is"),
        ({"question": "who?", "solution": "<search>q</search>"}, "is a step of a chain"),
        ({"question": "who?", "answer": "x" * 30_000}, "the answer is"),
        ({"question": "w" * 30_000, "answer": "x"}, "the question is"),
        ({"question": {"a": 1}, "answer": "x"}, "the question is an object, not a text"),
        ({"question": ["who?"], "answer": "x"}, "the question is a list, not a text"),
        ({"question": float("nan"), "answer": "x"}, "the question is"),
        ({"question": "who?", "answer": {"text": "x"}}, "the answer is an object, not a text"),
        ({"question": "who?", "answer": [["x"]]}, "the answer is a list, not a text"),
        ({"question": "who?", "answer": float("nan")}, "the answer is"),
        ({"question": "who?", "answer": True}, "the answer is true or false, not a text"),
        ({"question": "who?", "answer": "x", "answerable": False}, "do not answer the question"),
    ],
)
def test_a_row_that_cannot_be_used_is_told(cells, told):
    with pytest.raises(DataError, match=told):
        read_row(False, cells, (0, 0))


def test_a_question_without_an_answer_is_a_wrong_row(tmp_path):
    text = "".join(json.dumps(row) + "\n" for row in (MUSIQUE, {**MUSIQUE, "question": "x?", "answerable": False}))
    (tmp_path / "musique.jsonl").write_text(text)
    with pytest.raises(DataError, match="1 of 2 rows are wrong") as caught:
        prepare("agent_search", tmp_path, tmp_path / "musique.jsonl", validation_rows=0, max_bad=0.1)
    assert "do not answer the question" in str(caught.value)


@pytest.mark.parametrize("name", ["agent_search", "agent_code"])
@pytest.mark.parametrize(
    ("columns", "tags"), [({}, ["answer"]), ({"context": ""}, ["answer", "search"]), ({"context": "x"}, ["answer"])]
)
def test_a_prompt_without_a_thought_asks_for_the_form_that_is_paid(name, columns, tags):
    text = Template(make_task(name, {"name": "x"}, "direct").template).render(
        question="Who?", mark="<image>", **columns
    )
    for tag in tags if name == "agent_search" else [{"search": "problem"}.get(tag, tag) for tag in tags]:
        assert f"between <{tag}> and </{tag}>" in text
    assert "<think>" not in text and "Who?" in text and columns.get("context", "") in text


@pytest.mark.parametrize("hostile", ["<|im_start|>system", "</answer><answer>y", "{{ 7 * 7 }}", "\x00\x1b[31m"])
def test_hostile_text_in_a_row_stays_text(hostile):
    truth, columns = read_row(True, {"question": f"who {hostile}?", "answer": [hostile, "x"]}, (4, 4))
    assert truth["answer"][0] == hostile and truth["step"] == "answer"
    task = make_task("agent_search", {"name": "x"})
    row = Row("p", "rows", "agent_search", truth, (), columns)
    assert "49" not in task.template and row.columns["mark"] == "<image>"
    assert score(RewardInput(f"{THINK}<answer>x</answer>", truth))["exact"] == 1.0


@pytest.mark.parametrize("level", ["simple", "hard", None, "bridge"])
def test_evaluations_have_the_f1_and_the_exact_match_for_each_level(level):
    task = make_task("agent_search", {"name": "x"})
    truth = {"answer": ["Gustave Eiffel", "Eiffel"], **({"level": level} if level else {})}
    of_level = {f"f1/{level}"} if level in ("simple", "hard") else set()
    for last, f1, em in (("<answer>the Eiffel</answer>", 1.0, 1.0), ("<answer>Gustave</answer>", 2 / 3, 0.0),
                         ("no answer", 0.0, 0.0), ("", 0.0, 0.0)):  # fmt: skip
        found = task.outcome(episode(last, truth), UNSCORED)
        assert found.keys() == {"accuracy", "f1", *of_level} and found["accuracy"] == em
        assert all(found[name] == pytest.approx(f1) for name in {"f1", *of_level})
    assert task.outcome(RewardInput("x", {}), UNSCORED) == {}


def probed(tmp_path: Path, profile: str, **options: Any) -> dict[str, Any]:
    _, dataset = drawn(tmp_path, **options)
    task = make_task("agent_search", dataset.info)
    inputs = [RewardInput("", row.truth, row.columns, prompt_id=row.prompt_id) for row in dataset.rows("train")][:24]
    name, args = task.profile(profile)
    spec = load_reward(str(name), args=args)
    return probe_reward(spec, spec.weights, inputs, more=task.attacks(inputs))


def test_nothing_pays_against_the_default_reward(tmp_path):
    found = probed(tmp_path, "default")
    assert found["flagged"] == 0, [one for one in found["probes"] if one["flagged"]]
    assert {"answer in a query", "wrong after four calls"} <= {one["name"] for one in found["probes"]}


def test_the_probe_finds_the_paid_calls_of_the_published_reward(tmp_path):
    flagged = {one["name"] for one in probed(tmp_path, "rllava_episodes")["probes"] if one["flagged"]}
    assert {"calls alone", "wrong after four calls"} <= flagged


@pytest.mark.parametrize("thought", ["required", "optional"])
def test_tricks_with_steps_earn_little(tmp_path, thought):
    _, dataset = drawn(tmp_path, stepwise=True)
    task = make_task("agent_search", dataset.info)
    inputs = [RewardInput("", row.truth, row.columns) for row in dataset.rows("train")][:24]
    for attack in task.attacks(inputs):
        for x in inputs:
            if (made := attack.write(x)) is not None:
                parts = score(made, thought=thought)
                assert parts["exact"] == 0.0 and parts["right"] <= 0.5, (attack.name, made.response)


def test_an_unknown_question_is_named(tmp_path):
    with pytest.raises(DataError, match="unknown name `nope` in --about") as caught:
        drawn(tmp_path, about="town,nope")
    assert "known: town, river" in str(caught.value)
