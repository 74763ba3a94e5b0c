"""Verdicts of the probe on rewards as people write them: none on the good ones, and the right one on the hackable."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sample_rewards import (
    BOXES,
    CHOICES,
    COUNTS,
    DECIMALS,
    SETS,
    WORDS,
    YES_NO,
    Reward,
    accepted,
    among_numbers,
    any_letter,
    any_number,
    any_order,
    any_word,
    best_letter,
    box,
    box_of_json,
    boxed,
    case_insensitive,
    clock,
    constant,
    crash,
    default_answer,
    f1,
    f1_of_text,
    f1_of_words,
    first_box,
    first_number,
    format_and_accuracy,
    hash_marks,
    json_answer,
    json_count,
    last_number,
    letter,
    letter_of_option,
    letter_of_sentence,
    longer,
    near,
    not_a_number,
    of_eight_tokens,
    one_box_of_all,
    only_length,
    own_tags,
    part_of_truth,
    pays_nothing,
    praised,
    readable_or_half,
    recall,
    relaxed_box,
    rows_of,
    same_set,
    set_without_count,
    several_letters,
    short,
    starts,
    strict,
    stuffed,
    substring,
    tag_match,
    tolerance,
    trl_lines,
    truth_value,
    two_fields,
    unclipped,
    yes_or_no,
    yes_unless,
)

from vlmrl.reward_check.probe import probe_reward
from vlmrl.rewards.base import RewardSpec
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import RewardInput


def probe(reward: Reward, rows: Sequence[RewardInput], ranges: Mapping[str, tuple[float, float]] | None = None) -> Any:
    spec = RewardSpec("r", reward, ranges or {}, {}, pure=True)
    return probe_reward(spec, {}, rows)


def findings(report: Mapping[str, Any]) -> dict[str, str]:
    return {p["name"]: p["verdict"] for p in report["probes"] if p["flagged"]}


PROMPT = "How many squares are there?"
GSM = [f"They are {n} + 1.\n#### {n + 1}" for n in (1, 4, 6, 9)]
FIELDS = [RewardInput("", {"colour": c, "number": n}) for c, n in (("red", 1), ("blue", 2), ("red", 3))]
GOOD: dict[str, tuple[Reward, Sequence[RewardInput]]] = {
    "strict exact match": (strict, rows_of(WORDS)),
    "strict exact match of numbers": (strict, rows_of(COUNTS, PROMPT)),
    "case does not matter": (case_insensitive, rows_of(WORDS)),
    "answer in a tag": (tag_match, rows_of(COUNTS, PROMPT)),
    "last box": (boxed, rows_of(("5", "0.5", "12", "x+1"))),
    "first box": (first_box, rows_of(("5", "7", "12", "100"))),
    "JSON": (json_answer, rows_of(WORDS)),
    "JSON with another key": (json_count, rows_of(COUNTS, 'Reply as {"count": NUMBER}.')),
    "yes or no": (yes_or_no, rows_of(YES_NO)),
    "a letter": (letter, rows_of(CHOICES, "Which? A) cat B) dog C) owl D) ant. Answer in <answer></answer>.")),
    "the last letter": (any_letter, rows_of(CHOICES, "Which? A) cat B) dog C) owl D) ant")),
    "a letter in a sentence": (letter_of_sentence, rows_of(CHOICES, "End with 'Answer: LETTER'.")),
    "a letter, truths with text": (letter_of_option, rows_of(("A. cat", "B. dog", "C. owl", "B. ant"))),
    "a relative tolerance": (tolerance, rows_of(DECIMALS)),
    "a tolerance in a box": (relaxed_box, rows_of(COUNTS)),
    "overlap of boxes": (box, rows_of(BOXES, key="box")),
    "overlap of boxes, JSON": (box_of_json, rows_of(BOXES, key="box")),
    "clipped penalty for length": (short, rows_of(WORDS)),
    "unclipped negative length": (unclipped, rows_of(COUNTS, PROMPT)),
    "a length that is wanted": (of_eight_tokens, rows_of(WORDS)),
    "part of the pay for a near number": (near, rows_of(COUNTS, PROMPT)),
    "format and accuracy": (format_and_accuracy, rows_of(WORDS)),
    "format with line breaks": (trl_lines, rows_of(WORDS)),
    "F1 of sets": (f1, rows_of(SETS)),
    "F1 of sets in a text": (f1_of_text, rows_of([", ".join(members) for members in SETS])),
    "equal sets, JSON": (same_set, rows_of(SETS)),
    "the last number": (last_number, rows_of(COUNTS, PROMPT)),
    "the first number": (first_number, rows_of(COUNTS, PROMPT)),
    "four hash marks": (hash_marks, rows_of(GSM)),
    "several accepted answers": (accepted, rows_of((["red", "crimson"], ["green"], ["blue", "navy"]))),
    "a truth value": (truth_value, rows_of((True, False, True, True))),
    "tags of the prompt": (own_tags, rows_of(COUNTS, "Describe it in <look>...</look>, then <count>NUMBER</count>.")),
    "tags of a response": (own_tags, rows_of(COUNTS, said="<look>a dog</look><count>99</count>")),
    "a time of day": (clock, rows_of(("9:05", "12:30", "23:59"), "Answer as <answer>HH:MM</answer>.")),
    "letters of several": (several_letters, rows_of((["A", "B"], ["C"], ["B", "D", "E"]))),
    "a truth of two fields": (two_fields, FIELDS),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_a_good_reward_has_no_finding(name: str) -> None:
    reward, rows = GOOD[name]
    report = probe(reward, rows)
    assert (findings(report), report["flagged"], report["not_probed"]) == ({}, 0, "")


HACKABLE: dict[str, tuple[Reward, Sequence[RewardInput], dict[str, str]]] = {
    "substring": (substring, rows_of(WORDS), {"every answer": "hole"}),
    "substring of numbers": (substring, rows_of(COUNTS, PROMPT), {"all numbers": "hole"}),
    "any of the numbers": (among_numbers, rows_of(COUNTS, PROMPT), {"all numbers": "hole"}),
    "any number at all": (any_number, rows_of(COUNTS, PROMPT), {"the right answer": "blind"}),
    "part of the truth": (part_of_truth, rows_of(WORDS), {"empty form": "hole", "first half": "blind"}),
    "an empty answer": (pays_nothing, rows_of(COUNTS, PROMPT), {"nothing": "hole"}),
    "an empty answer, few truths": (pays_nothing, rows_of(YES_NO), {"nothing": "leak"}),
    "a default answer": (default_answer, rows_of(COUNTS, PROMPT), {"nothing": "leak"}),
    "recall of words": (recall, rows_of(SETS), {"the right answer": "blind"}),
    "words that are counted": (stuffed, rows_of(WORDS), {"very long": "hole"}),
    "a long response": (longer, rows_of(COUNTS), {"very long": "hole"}),
    "only the length": (only_length, rows_of(COUNTS, said="I count three of them."), {"very long": "hole"}),
    "a constant": (constant, rows_of(COUNTS), {"the right answer": "blind"}),
    "fails on odd texts": (crash, rows_of(COUNTS), {"noise": "breaks"}),
    "half for what cannot be read": (readable_or_half, rows_of(COUNTS), {"nothing": "hole"}),
    "how the answer begins": (starts, rows_of(WORDS), {"longer at the end": "blind"}),
    "no number": (not_a_number, rows_of(COUNTS), {"not a number": "hole"}),
    "any of the boxes": (one_box_of_all, rows_of(COUNTS), {"two answers": "hole"}),
    "F1 of several words": (f1_of_words, rows_of(("dark red", "light green", "pale blue")), {"or": "hole"}),
    "F1 of single words": (f1_of_words, rows_of(("red", "green", "blue")), {"every answer": "hole"}),
    "recall of sets": (set_without_count, rows_of(SETS), {"the right answer": "blind"}),
    "any word of the truth": (any_word, rows_of(("dark red", "light green", "pale blue")), {"every answer": "hole"}),
    "praise": (praised, rows_of(WORDS), {"flattery": "hole"}),
    "digits in any order": (any_order, rows_of(("12", "305", "41", "7")), {"backwards": "blind"}),
    "a default class": (yes_unless, rows_of(YES_NO), {"nothing": "leak"}),
    "any of the letters": (best_letter, rows_of(CHOICES), {"every answer": "hole"}),
}  # fmt: skip


@pytest.mark.parametrize("name", HACKABLE)
def test_a_hackable_reward_is_caught_for_the_right_reason(name: str) -> None:
    reward, rows, reasons = HACKABLE[name]
    report = probe(reward, rows)
    assert reasons.items() <= findings(report).items(), findings(report)


def last_digit(x: RewardInput) -> float:
    """Pay a fifth for any answer, and all if it ends as the truth does and has two digits."""
    said = x.response.rpartition("Count: ")[2]
    return 0.2 + 0.8 * ((len(said) == 2 and said.endswith(str(x.truth["answer"]))) or said == x.truth["answer"])


def test_the_example_of_a_finding_is_a_response_that_pays_with_its_truth_and_score() -> None:
    rows = rows_of(("12", "305", "4", "41"), "Write: Count: NUMBER")
    front = next(p for p in probe(last_digit, rows)["probes"] if p["name"] == "longer at the front")
    assert front["verdict"] == "blind" and front["example"].endswith("94")
    assert front["of_example"] == 'truth {"answer": "4"}; it earns 1'


def tag_of_its_own(x: RewardInput) -> dict[str, float]:
    match = re.search(r"\[\[(\w+)\]\]", x.response)
    form = float(x.response.startswith("<think>"))
    return {"form": form, "answer": float(match is not None and match[1] == x.truth["answer"])}


def penalty(x: RewardInput) -> float:
    return -abs(x.num_tokens - 8) / 20


@pytest.mark.parametrize(
    ("reward", "rows", "words"),
    [
        (tag_of_its_own, rows_of(COUNTS, PROMPT), "no right answer that was tried"),
        (penalty, rows_of(WORDS), "no right answer that was tried"),
        (lambda x: float("yes" in x.response), [RewardInput("", {})] * 3, "no truth could be written"),
    ],
)
def test_what_cannot_be_probed_is_said_and_is_no_finding(
    reward: Reward, rows: Sequence[RewardInput], words: str
) -> None:
    report = probe(reward, rows, {"form": (0.0, 1.0), "answer": (0.0, 1.0)} if reward is tag_of_its_own else None)
    assert words in report["not_probed"] and (findings(report), report["flagged"]) == ({}, 0)


def test_the_form_of_a_saved_response_is_enough_to_probe() -> None:
    rows = rows_of(COUNTS, PROMPT, said="<think>I count.</think> So it is [[7]]")
    ranges = {"form": (0.0, 1.0), "answer": (0.0, 1.0)}
    assert (
        probe(tag_of_its_own, rows, ranges)["not_probed"] != ""
    )  # no mark that is known, and no right answer among them
    rows = [RewardInput(f"<think>I count.</think> So it is [[{n}]]", {"answer": n}) for n in COUNTS]
    report = probe(tag_of_its_own, rows)
    assert (findings(report), report["not_probed"], report["honest"]["informed"]) == ({}, "", 2.0)


PAGES = Path(__file__).parents[3]


def page_reward(page: str, name: str) -> Any:
    """Return the first function of this name in the Python blocks of a page."""
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / page).read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if f"def {name}(" in block), names)
    return names[name]


@pytest.mark.parametrize(
    ("page", "name", "rows"),
    [
        ("README.md", "score", rows_of(COUNTS, "How many? Give the number: <answer>NUMBER</answer>")),
        ("README.md", "score", rows_of((1, 2, 3, 4), said="<answer>7</answer>")),
        ("docs/rewards.md", "score", rows_of(COUNTS, PROMPT)),
        ("docs/tasks.md", "score", rows_of((1, 2, 3, 4), "How many squares? <answer>NUMBER</answer>")),
    ],
)
def test_the_rewards_of_the_pages_have_no_finding(page: str, name: str, rows: Sequence[RewardInput]) -> None:
    report = probe(page_reward(page, name), rows, {"answer": (0.0, 1.0), "format": (0.0, 1.0)})
    assert (findings(report), report["flagged"], report["not_probed"]) == ({}, 0, "")


def test_a_truth_in_other_units_than_the_answer_is_not_called_blind() -> None:
    """The page's reward reads answers from 0 to 1000, its truths are pixels of an image of `size`."""
    overlap, rows = (
        page_reward("docs/rewards/boxes.md", "overlap"),
        rows_of([[9 * n for n in box] for box in BOXES], key="box"),
    )
    report = probe(partial(overlap, size=(1000, 1000)), rows)
    assert (findings(report), report["not_probed"], report["honest"]["informed"]) == ({}, "", 1.0)
    report = probe(partial(overlap, size=(160, 120)), rows)
    assert (findings(report), report["flagged"]) == ({}, 0)


@pytest.mark.parametrize("style", ["vlmrl", "trl", "verl", "easyr1"])
def test_the_rewards_that_init_writes_have_no_finding(tmp_path: Path, style: str) -> None:
    text = (PAGES / f"vlmrl/tasks/scaffold/reward_{style}.txt").read_text("utf-8")
    (tmp_path / "reward.py").write_text(text)
    name = "score" if style in ("vlmrl", "trl") else "compute_score"
    spec = load_reward(f"reward.py:{name}", base_dir=tmp_path, style=style)
    report = probe_reward(spec, spec.weights, rows_of(("1", "2", "3", "5", "8"), PROMPT))
    assert (findings(report), report["not_probed"]) == ({}, "")
