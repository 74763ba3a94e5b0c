"""One right answer is tried on a user's reward: it must earn more than a wrong one of its form."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vlmrl.setup.prompts import TruthScan, differing_parts, paid, searched, told_answers, trial_of, truth_form, unpaid
from vlmrl.types import Message, Row, Score


def row(answer: object, place: str = "rows.jsonl:1") -> Row:
    return Row("p", "rows", "table", {"answer": answer}, (), {}, place)


def source(prompt: str = "How many?") -> SimpleNamespace:
    return SimpleNamespace(messages=lambda row: (Message("user", prompt),))


@pytest.mark.parametrize(
    ("answer", "wrong"), [(3, "39"), ("3", "39"), (2.5, "2.59"), ("cat", "no cat"), (True, "no True")]
)
def test_each_form_is_tried_with_the_right_and_with_a_wrong_answer(answer: object, wrong: str) -> None:
    texts = trial_of(source(), [row(answer), row(answer), row("other" if isinstance(answer, str) else 7)])
    third = len(texts) // 3
    right, other, longer = ({*texts[i * third : (i + 1) * third]} for i in range(3))
    assert {str(answer), f"<answer>{answer}</answer>", f"\\boxed{{{answer}}}"} <= right
    assert {wrong, f"<answer>{wrong}</answer>"} <= longer and not right & (other | longer)
    assert {"<answer>other</answer>", "<answer>7</answer>"} & other
    assert trial_of(source(), [row([1, 2])]) == [] == trial_of(source(), [row(None)])
    assert {wrong, f"<answer>{wrong}</answer>"} <= {*trial_of(source(), [row(answer)])[third : 2 * third]}


def test_a_form_that_the_prompt_shows_is_tried() -> None:
    shown = 'Think in <look>...</look>, then write <n>NUMBER</n>, or {"count": NUMBER}, or Answer: NUMBER'
    texts = trial_of(source(shown), [row(3)])
    assert {"<look>I cannot tell.</look><n>3</n>", "<n>3</n>", '{"count": 3}', "Answer: 3"} <= {*texts}


@pytest.mark.parametrize(
    ("prompt", "response"),
    [
        ("<image>\nWhat hour? Write: The hour is [HOUR]", "The hour is [3]"),
        ("Write: The hour is [hour]. Think first.", "The hour is 3."),
        ('Write "It is HH o\'clock"!', "It is 3 o'clock"),
        ("How many squares? There are ___ squares.", "There are 3 squares."),
        ("Write: Hour: <HOUR>", "Hour: 3"),
    ],
)
def test_a_sentence_with_a_placeholder_is_tried_whole(prompt: str, response: str) -> None:
    assert response in trial_of(source(prompt), [row(3)])


def test_what_is_paid_is_more_than_a_wrong_answer_of_the_same_form() -> None:
    right, wrong = [Score(0.0, {}), Score(1.0, {})], [Score(0.0, {}), Score(0.2, {})]
    assert paid("ab", [*right, *wrong]) == (1.0, "b")
    assert paid("ab", [*right, *right]) is None  # the format alone is paid


def test_of_equally_paid_answers_the_one_that_the_prompt_shows_counts_else_the_shortest() -> None:
    texts, scores = ["\\boxed{3}", "<answer>3</answer>", "3", "", "", ""], [Score(1.0, {})] * 3 + [Score(0.0, {})] * 3
    assert paid(texts, scores) == (1.0, "3")
    assert paid(texts, scores, "write <answer>...</answer>") == (1.0, "<answer>3</answer>")
    assert paid(texts, scores, "write \\boxed{...}") == (1.0, "\\boxed{3}")


def test_a_reward_that_searches_for_the_truth_in_the_text_is_told() -> None:
    texts = trial_of(source(), [row("2"), row("7")])
    scores = [Score(1.5 if "2" in text else -0.5, {}) for text in texts]
    pairs = 2 * len(texts) // 3
    assert paid(texts[:pairs], scores[:pairs]) == (1.5, "2")
    [problem] = searched("rows", texts, scores, "r.toml:3")
    assert "pays 1.5 for the wrong '29' as for the right '2'" in problem.message and problem.level == "warning"
    exact = [Score(float("2" in text and "29" not in text), {}) for text in texts]
    assert searched("rows", texts, exact, "") == searched("rows", texts, [Score(1.0, {})] * len(texts), "") == []


OPTIONS = ("cat", "dog", "fish", "bird")


@pytest.mark.parametrize(
    ("prompt", "is_told"),
    [
        ("What is it? Answer: {answer}", True),
        ("It is a {answer}. What is it?", True),
        ("{answer}", True),
        ("What is it: cat, dog, fish or bird?", False),
        ("What is it?\n(A) {answer}\n(B) horse", False),  # the options differ between rows
        ("What is it?\n- {answer}\n- horse", False),
        ('Choose from ["{answer}", "horse"].', False),
        ("Is it a horse or a {answer}?", False),
        ("Is it a {answer}/horse?", False),
        ("What is it? Some look like {answer}fish.", False),
        ("What is it?", False),
    ],
)
def test_prompts_that_state_the_answer_are_told_and_options_are_not(prompt: str, is_told: bool) -> None:
    rows = [row(OPTIONS[i % 4], f"rows.jsonl:{i}") for i in range(12)]
    of_rows = SimpleNamespace(
        name="rows", messages=lambda r: (Message("user", prompt.replace("{answer}", r.truth["answer"])),)
    )
    told = told_answers(of_rows, rows, "r.toml:3")
    assert bool(told) is is_told
    if told:
        assert "12 of 12 sampled prompts of `rows` state the right answer" in told[0].message
        assert told[0].level == "warning" and told_answers(of_rows, rows[:7], "") == []


@pytest.mark.parametrize(("tail", "is_told"), [("", False), ("\nHint: {answer}", True)])
def test_a_letter_of_several_choices_is_told_only_where_it_stands_alone(tail: str, is_told: bool) -> None:
    rows = [row("ABCD"[i % 4]) for i in range(12)]
    prompt = "What is it?\nA) cat\nB) dog\nC) fish\nD) bird\nAnswer with A, B, C or D." + tail
    of_rows = SimpleNamespace(
        name="rows", messages=lambda r: (Message("user", prompt.replace("{answer}", r.truth["answer"])),)
    )
    assert bool(told_answers(of_rows, rows, "")) is is_told


def test_the_warning_says_the_type_of_the_truth() -> None:
    problem = unpaid("rows", row(3), "r.toml:3", reads_text=True)
    assert "`answer` is an integer, such as 3" in problem.message and problem.level == "warning"
    assert 'str(x.truth["answer"])' in (problem.hint or "")
    plain = unpaid("rows", row(3), "", reads_text=False)
    assert "was not tested" in plain.message and "str(x" not in (plain.hint or "")
    assert truth_form(row("cat")) == "`answer` is text, such as cat"


def test_parts_that_differ_between_rows_are_named() -> None:
    pairs = [(row("1", "rows.jsonl:1"), Score(1.0, {"a": 1.0})), (row("1", "rows.jsonl:2"), Score(1.0, {"b": 1.0}))]
    [problem] = differing_parts("rows", pairs, "r.toml:3")
    assert "a for rows.jsonl:1 (p); b for rows.jsonl:2 (p)" in problem.message
    assert differing_parts("rows", pairs[:1] * 2, "") == []


def scanned(*truths: dict[str, object]) -> list[str]:
    scan = TruthScan()
    rows = [
        Row("p", "rows", "table", truth, (), {"label": "x"}, f"rows.jsonl:{n}") for n, truth in enumerate(truths, 1)
    ]
    for one in rows:
        scan.look(one)
    problems = scan.problems(SimpleNamespace(name="rows", split="train", rows=rows), "r.toml:3")
    assert all(problem.level == "warning" for problem in problems)
    return [f"{problem.message} {problem.hint}" for problem in problems]


def test_a_truth_that_is_empty_in_all_rows_is_a_warning_with_the_columns() -> None:
    [words] = scanned({}, {})
    assert "of `rows` (train) is empty in all 2 rows" in words
    assert "the columns: label" in words and 'columns = {answer = "..."}' in words
    assert scanned({}, {"answer": "a"}) == [] == scanned()


@pytest.mark.parametrize("at", [0, 2])
def test_the_first_row_of_another_type_is_named(at: int) -> None:
    truths: list[dict[str, object]] = [{"answer": "6:15"}] * 3
    truths[at] = {"answer": 615}
    [words] = scanned(*truths)
    assert f"`answer` of `rows` (train) is text in most rows, but a number in rows.jsonl:{at + 1} (p): 615" in words


def test_kinds_of_numbers_and_a_missing_value_are_no_other_type() -> None:
    assert scanned({"answer": 3}, {"answer": 2.5}, {"answer": None}) == []
    assert len(scanned({"answer": 1}, {"answer": True})) == 1
