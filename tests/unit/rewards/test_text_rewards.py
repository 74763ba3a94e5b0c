from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.errors import RewardError
from vlmrl.rewards import reward_record
from vlmrl.rewards.text_rewards import ground_truth, plain_number, word_overlap
from vlmrl.tasks.builtin_rewards import REWARDS, load_recorded, load_reward
from vlmrl.types import RewardInput


def parts(name, response, truth="7", finish="stop", num_tokens=1, **args):
    x = RewardInput(response, {"answer": truth} if truth is not None else {}, finish=finish, num_tokens=num_tokens)
    return load_reward(name, args=args)(x)


@pytest.mark.parametrize(
    ("response", "truth", "answer", "form"),
    [
        ("<think>x</think><answer> Two  Cats</answer>", "two cats", 1, 1),
        ("two cats", "Two cats", 1, 0),
        ("I see two cats", "two cats", 0, 0),
        ("<answer>two cats</answer><answer>a dog</answer>", "two cats", 0, 0),
        ("<answer>two cats", "two cats", 0, 0),
        ("<answer></answer>", " ", 0, 1),
        ("", "", 0, 0),
        ("<answer>b</answer>", ["a", "b"], 1, 1),
        ("<answer>none</answer>", ["a", "b"], 0, 1),
    ],
)
def test_exact_match(response, truth, answer, form):
    assert parts("exact_match", response, truth) == {"answer": float(answer), "format": float(form)}


def test_exact_match_options():
    assert parts("exact_match", "7", require_tag=True)["answer"] == 0.0
    assert parts("exact_match", "<box>7</box>", tag="box")["answer"] == 1.0
    assert parts("exact_match", "<answer>7</answer>", tag=None)["answer"] == 0.0
    assert load_reward("exact_match").weights == {"answer": 1.0}


TAGGED = "<think>Four and three.</think>\n<answer>7</answer>"


@pytest.mark.parametrize(
    "name", ["exact_match", "number_match", "token_f1", "crop", "agent_code", "agent_search", "we_math"]
)
def test_a_copy_of_a_truth_with_an_answer_tag_is_right(name):
    def score(response, truth):
        answer = parts(name, response, truth)
        return answer.get("answer", answer.get("accuracy", answer.get("right")))

    assert [score(TAGGED, TAGGED), score(TAGGED, "7")] == [1.0, 1.0]
    assert score("<answer>8</answer>", TAGGED) == 0.0


@pytest.mark.parametrize("name", ["exact_match", "number_match", "token_f1"])
def test_a_truth_is_read_by_the_rule_of_the_response(name):
    assert [parts(name, text, TAGGED)["answer"] for text in ("7", "\\boxed{7}", "8")] == [1.0, 0.0, 0.0]
    assert parts(name, "<box>7</box>", ["9", "so <box>7</box>"], tag="box")["answer"] == 1.0
    assert parts("exact_match", TAGGED, TAGGED, tag=None)["answer"] == 1.0
    two = "<answer>7</answer><answer>8</answer>"
    assert parts("exact_match", "7", two)["answer"] == 0.0  # it names no answer, and no part of it is taken for one


@pytest.mark.parametrize(
    ("response", "truth", "answer"),
    [
        ("<answer>7.0</answer>", 7, 1), ("7", "7.00", 1), ("-1,234.5", -1234.5, 1), ("+3", 3, 1), ("7 apples", 7, 0),
        ("1e3", 1000, 0), ("1_000", 1000, 0), ("\u0667", 7, 0), ("nan", 7, 0), ("12,34", 1234, 0),
        ("<answer>7</answer>8", 7, 1),
    ],
)  # fmt: skip
def test_number_match(response, truth, answer):
    assert parts("number_match", response, truth)["answer"] == float(answer)


@pytest.mark.parametrize(
    ("answer", "truth", "f1", "same"),
    [
        ("The cat, sat!", "a cat sat", 1.0, 1),
        ("very very big", "very very big", 1.0, 1),  # published code gives 0.667: it counts a repeated word once
        ("very big", "very very big", 0.8, 0),  # 2 x 2 / (2 + 3)
        ("very very very big", "very big", 2 * 2 / 6, 0),
        ("sat cat", "cat sat", 1.0, 0),
        ("red", "blue", 0.0, 0),
        ("blue", ["red", "dark blue", "blue car"], 2 / 3, 0),
        ("blue", ["red", "Blue."], 1.0, 1),
        ("the", "the", 1.0, 1),  # nothing is left of both: they are compared as they are
        ("!!!", "???", 0.0, 0),
        ("!!!", "!!!", 1.0, 1),
        ("the", "an", 0.0, 0),
        ("", "", 1.0, 1),
        ("", "cat", 0.0, 0),
        ("\u6c34\u4e2d", "\u4e2d", 2 / 3, 0),
        ("It's 1,000.5 km", "its 1000.5km", 1.0, 1),
        ("1000", 1000, 1.0, 1),
        ("well-known", "well known", 1.0, 1),
    ],
)
def test_token_f1(answer, truth, f1, same):
    scored = parts("token_f1", f"<answer>{answer}</answer>", truth)
    assert scored == {"f1": pytest.approx(f1), "answer": float(same), "format": 1.0}


def test_token_f1_reads_the_tag_as_exact_match_does():
    assert parts("token_f1", "a blue car", "blue car") == {"f1": 1.0, "answer": 1.0, "format": 0.0}
    assert parts("token_f1", "<answer>a</answer><answer>b</answer>", "b")["f1"] == 0.0
    assert parts("token_f1", "blue", "blue", require_tag=True)["f1"] == 0.0
    assert load_reward("token_f1").weights == {"f1": 1.0}


@given(st.text(), st.text(), st.text())
def test_token_f1_of_any_texts(a, b, c):
    f1, same = word_overlap(a, [b, c])
    assert 0.0 <= f1 <= 1.0 and (not same or f1 == 1.0) and word_overlap(a, [c, b]) == (f1, same)
    assert word_overlap(a, [b])[0] == pytest.approx(word_overlap(b, [a])[0]), "it is symmetric"
    assert word_overlap(a, [c, a]) == (1.0, True)


def test_number_match_tolerance_and_bad_truth():
    assert parts("number_match", "3.1", 3, tolerance=0.2)["answer"] == 1.0
    assert parts("number_match", "3.3", 3, tolerance=0.2)["answer"] == 0.0
    for truth in ("seven", float("nan"), float("inf"), {"a": 1}):
        with pytest.raises(RewardError, match="not a number"):
            parts("number_match", "7", truth)
    with pytest.raises(RewardError, match="tolerance"):
        load_reward("number_match", args={"tolerance": -1})
    assert plain_number("1" * 400) is None


def test_format_tags():
    good = "<think>a</think>\n<answer>b</answer>"
    assert parts("format_tags", good)["format"] == 1.0
    bad = [
        "",
        "x" + good,
        good + "x",
        good + good,
        "<think></think><answer>b</answer>",
        "<answer>b</answer><think>a</think>",
    ]
    assert [parts("format_tags", text)["format"] for text in bad] == [0.0] * len(bad)
    assert parts("format_tags", good, finish="length")["format"] == 0.0
    assert parts("format_tags", "<a>1</a>", tags=["a"])["format"] == 1.0


def test_length_falls_from_soft_to_max():
    args = {"soft_tokens": 10, "max_tokens": 20}
    values = [parts("length", "x", num_tokens=n, **args)["length"] for n in (1, 10, 15, 20, 30)]
    assert values == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert parts("length", "x", num_tokens=5, finish="length", **args)["length"] == 0.0
    with pytest.raises(RewardError, match="0 < soft < max"):
        load_reward("length", args={"soft_tokens": 20, "max_tokens": 20})


@pytest.mark.parametrize(
    ("truth", "columns", "found"),
    [
        ({"answer": 1}, {"answer": 2, "solution": 3}, 1),
        ({}, {"ground_truth": 4, "answer": 2}, 4),
        ({}, {"reward_model": {"ground_truth": "5", "style": "rule"}}, "5"),
        ({"count": 6}, {}, 6),
        ({"answer": None}, {"solution": 0}, 0),
    ],
)
def test_the_expected_answer_is_found_in_every_spelling(truth, columns, found):
    assert ground_truth(RewardInput("x", truth, columns)) == found


def test_a_missing_answer_is_an_error_that_names_the_columns():
    with pytest.raises(RewardError, match="its columns: a, b, c") as error:
        ground_truth(RewardInput("x", {"a": 1, "b": 2}, {"c": 3}))
    assert "key" in (error.value.hint or "")
    with pytest.raises(RewardError, match="under `sum`"):
        parts("exact_match", "x", key="sum")


def test_every_builtin_has_a_summary_a_version_and_weights_within_its_parts():
    args = {
        "taxonomy": {"levels": ["a"]},
        "taxonomy_relations": {"levels": ["a"]},
        "pair_labels": {"tag": "age-group", "labels": ["Adult"]},
        "taxonrl": {"function": "lfw:compute_score"},
        "length": {"soft_tokens": 1, "max_tokens": 2},
        "box_iou": {"space": "pixels"},
        "box_list": {"space": "pixels"},
        "svg_models": {"dino": True},
        "judge": {"judge": {"provider": "vllm", "model": "m"}},
        "vfig": {"judge": {"provider": "vllm", "model": "m"}},
    }
    for name, builtin in REWARDS.items():
        spec = load_reward(name, args=args.get(name, {}))
        assert builtin.summary and spec.name == name and spec.version == builtin.version >= 1
        assert spec.pure != (spec.worker is not None or spec.service is not None) and spec.is_builtin
        assert set(spec.weights) <= set(spec.ranges)


def test_a_reward_is_loaded_again_from_its_record():
    spec = load_reward("taxonomy", args={"levels": ["a", "b"], "partial": False})
    record = reward_record(spec, {"answer": 1.0})
    again = load_recorded(record)
    assert (again.name, again.args, again.version) == (spec.name, spec.args, record["version"])
    assert again.fn == spec.fn and record["weights"] == {"answer": 1.0}
    for broken in ({}, {"name": "taxonomy"}, {"name": 3, "args": {}}):
        with pytest.raises(RewardError, match="manifest does not say"):
            load_recorded(broken)
