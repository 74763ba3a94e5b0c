"""Verdicts of the probe on rewards as people write them: none on the good ones, and the right one on the hackable."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from vlmrl.reward_check.probe import probe_reward
from vlmrl.rewards.base import RewardSpec
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import RewardInput

Reward = Callable[[RewardInput], "float | Mapping[str, float | None]"]
TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
COUNTS = ("1", "2", "3", "4", "5", "12", "3", "1")
DECIMALS = ("12.5", "0.75", "3.14", "100.0", "42")
WORDS = ("red", "green", "dark blue", "red", "yellow")
CHOICES = ("A", "B", "D", "C", "B", "A")
YES_NO = ("yes", "no", "no", "yes", "no")
SETS = (["cat", "dog"], ["owl"], ["dog", "ant", "owl"], ["cat", "owl"])
BOXES = ([10, 20, 60, 80], [5, 5, 30, 40], [50, 10, 90, 95], [0, 40, 45, 99])


def rows_of(answers: Sequence[Any], prompt: str = "", said: str = "", key: str = "answer") -> list[RewardInput]:
    return [RewardInput(said, {key: answer}, prompt=prompt) for answer in answers]


def tagged(x: RewardInput) -> str:
    match = TAG.search(x.response)
    return match[1].strip() if match else ""


def probe(reward: Reward, rows: Sequence[RewardInput], ranges: Mapping[str, tuple[float, float]] | None = None) -> Any:
    spec = RewardSpec("r", reward, ranges or {}, {}, pure=True)
    return probe_reward(spec, {}, rows)


def findings(report: Mapping[str, Any]) -> dict[str, str]:
    return {p["name"]: p["verdict"] for p in report["probes"] if p["flagged"]}


def strict(x: RewardInput) -> float:
    return float(x.response == x.truth["answer"])


def case_insensitive(x: RewardInput) -> float:
    return float(x.response.strip().casefold() == x.truth["answer"].casefold())


def tag_match(x: RewardInput) -> float:
    return float(tagged(x) == x.truth["answer"])


def boxed(x: RewardInput) -> float:
    said = re.findall(r"\\boxed\{([^{}]*)\}", x.response)
    return float(bool(said) and said[-1].strip() == x.truth["answer"])


def first_box(x: RewardInput) -> float:
    said = re.search(r"\\boxed\{(.*?)\}", x.response)
    return float(said is not None and said[1] == x.truth["answer"])


def json_answer(x: RewardInput) -> float:
    try:
        return float(json.loads(x.response)["answer"] == x.truth["answer"])
    except (ValueError, KeyError, TypeError):
        return 0.0


def json_count(x: RewardInput) -> float:
    match = re.search(r"\{.*\}", x.response, re.DOTALL)
    try:
        said = json.loads(match[0])["count"] if match else None
    except (ValueError, KeyError):
        return 0.0
    return float(said == int(x.truth["answer"]))


def yes_or_no(x: RewardInput) -> float:
    words = re.findall(r"[a-z]+", tagged(x).lower())
    return float(words[:1] == [x.truth["answer"]])


def letter(x: RewardInput) -> float:
    match = re.search(r"\b([A-D])\b", tagged(x))
    return float(match is not None and match[1] == x.truth["answer"])


def any_letter(x: RewardInput) -> float:
    said = re.findall(r"[A-D]", x.response)
    return float(bool(said) and said[-1] == x.truth["answer"])


def letter_of_sentence(x: RewardInput) -> float:
    match = re.search(r"Answer: ([A-D])", x.response)
    return float(match is not None and match[1] == x.truth["answer"])


def letter_of_option(x: RewardInput) -> float:
    return float(tagged(x) == x.truth["answer"][0])


def tolerance(x: RewardInput) -> float:
    try:
        said = float(tagged(x))
    except ValueError:
        return 0.0
    true = float(x.truth["answer"])
    return float(abs(said - true) <= 0.05 * abs(true))


def relaxed_box(x: RewardInput) -> float:
    said = re.findall(r"\\boxed\{([^{}]*)\}", x.response)
    try:
        return float(abs(float(said[-1]) - float(x.truth["answer"])) <= 0.01) if said else 0.0
    except ValueError:
        return 0.0


def overlap(a: Sequence[float], b: Sequence[float]) -> float:
    width, height = (max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1))
    areas = [max(0.0, c[2] - c[0]) * max(0.0, c[3] - c[1]) for c in (a, b)]
    return width * height / max(1e-9, sum(areas) - width * height)


def box(x: RewardInput) -> float:
    numbers = [float(n) for n in NUMBER.findall(tagged(x))]
    return overlap(numbers[:4], x.truth["box"]) if len(numbers) >= 4 else 0.0


def box_of_json(x: RewardInput) -> dict[str, float]:
    try:
        said = json.loads(tagged(x))
    except ValueError:
        return {"format": 0.0, "iou": 0.0}
    is_box = isinstance(said, list) and len(said) == 4 and all(isinstance(n, (int, float)) for n in said)
    return {"format": float(is_box), "iou": overlap(said, x.truth["box"]) if is_box else 0.0}


def short(x: RewardInput) -> float:
    return float(tagged(x) == x.truth["answer"]) - min(0.2, 0.002 * len(x.response))


def unclipped(x: RewardInput) -> float:
    return float(tagged(x) == x.truth["answer"]) - 0.01 * x.num_tokens


def of_eight_tokens(x: RewardInput) -> dict[str, float]:
    return {"answer": float(tagged(x) == x.truth["answer"]), "length": -abs(x.num_tokens - 8) / 20}


def near(x: RewardInput) -> float:
    match = re.fullmatch(r"<answer>(\d{1,4})</answer>", x.response.strip())
    return 0.0 if match is None else max(0.0, 1 - abs(int(match[1]) - int(x.truth["answer"])) / 2)


def format_and_accuracy(x: RewardInput) -> dict[str, float]:
    match = re.fullmatch(r"<think>.*?</think>\s*<answer>(.*?)</answer>", x.response.strip(), re.DOTALL)
    return {
        "format": 0.2 * (match is not None),
        "accuracy": 0.8 * (match is not None and match[1].strip() == x.truth["answer"]),
    }


def trl_lines(x: RewardInput) -> dict[str, float]:
    form = re.match(r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$", x.response, re.DOTALL)
    return {"format": float(form is not None), "accuracy": float(tagged(x) == x.truth["answer"])}


def f1(x: RewardInput) -> float:
    said, true = {w.strip().lower() for w in tagged(x).split(",")} - {""}, set(x.truth["answer"])
    return 2 * len(said & true) / (len(said) + len(true)) if said else 0.0


def f1_of_text(x: RewardInput) -> float:
    return f1(RewardInput(x.response, {"answer": x.truth["answer"].split(", ")}))


def f1_of_words(x: RewardInput) -> float:
    said, true = tagged(x).lower().split(), x.truth["answer"].lower().split()
    common = sum(min(said.count(w), true.count(w)) for w in set(said))
    return 2 * common / (len(said) + len(true)) if common else 0.0


def same_set(x: RewardInput) -> float:
    try:
        return float(sorted(json.loads(x.response)) == sorted(x.truth["answer"]))
    except (ValueError, TypeError):
        return 0.0


def last_number(x: RewardInput) -> float:
    said = NUMBER.findall(x.response)
    return float(bool(said) and float(said[-1]) == float(x.truth["answer"]))


def first_number(x: RewardInput) -> float:
    said = NUMBER.search(x.response)
    return float(said is not None and said[0] == x.truth["answer"])


def hash_marks(x: RewardInput) -> float:
    said = re.search(r"#### (-?[0-9.,]+)", x.response)
    return float(said is not None and said[1].replace(",", "") == x.truth["answer"].split("#### ")[1])


def accepted(x: RewardInput) -> float:
    return float(tagged(x).lower() in x.truth["answer"])


def truth_value(x: RewardInput) -> float:
    return float(tagged(x).lower() == ("yes" if x.truth["answer"] else "no"))


def own_tags(x: RewardInput) -> float:
    match = re.fullmatch(r"<look>.+</look><count>(\d+)</count>", x.response)
    return float(match is not None and match[1] == x.truth["answer"])


def two_fields(x: RewardInput) -> dict[str, float]:
    try:
        said = json.loads(x.response)
    except ValueError:
        said = None
    said = said if isinstance(said, dict) else {}
    return {name: float(said.get(name) == x.truth[name]) for name in ("colour", "number")}


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
    "a truth of two fields": (two_fields, FIELDS),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_a_good_reward_has_no_finding(name: str) -> None:
    reward, rows = GOOD[name]
    report = probe(reward, rows)
    assert (findings(report), report["flagged"], report["not_probed"]) == ({}, 0, "")


def substring(x: RewardInput) -> float:
    return float(x.truth["answer"] in x.response)


def among_numbers(x: RewardInput) -> float:
    return float(x.truth["answer"] in NUMBER.findall(x.response))


def any_number(x: RewardInput) -> float:
    return float(NUMBER.search(x.response) is not None)


def part_of_truth(x: RewardInput) -> float:
    return float(tagged(x).lower() in x.truth["answer"])


def pays_nothing(x: RewardInput) -> float:
    said = tagged(x)
    return 0.3 if not said else float(said == x.truth["answer"])


def default_answer(x: RewardInput) -> float:
    match = TAG.search(x.response)
    said = float(match[1]) if match and NUMBER.fullmatch(match[1]) else 3.0
    return max(0.0, 1 - abs(said - float(x.truth["answer"])) / 5)


def recall(x: RewardInput) -> float:
    return sum(word in x.response.lower() for word in x.truth["answer"]) / len(x.truth["answer"])


def stuffed(x: RewardInput) -> float:
    words = ("because", "therefore", "first", "so ")
    return 0.5 * float(tagged(x) == x.truth["answer"]) + 0.5 * min(1.0, sum(map(x.response.count, words)) / 20)


def longer(x: RewardInput) -> float:
    return float(tagged(x) == x.truth["answer"]) + min(1.0, len(x.response) / 4000)


def only_length(x: RewardInput) -> float:
    return min(1.0, len(x.response) / 1000)


def constant(x: RewardInput) -> float:
    return 0.5


def crash(x: RewardInput) -> float:
    return (
        float(int(x.response.split("<answer>")[1].split("</answer>")[0]) == int(x.truth["answer"]))
        if "<" in x.response
        else 0.0
    )


def readable_or_half(x: RewardInput) -> float:
    try:
        return float(float(tagged(x)) == float(x.truth["answer"]))
    except ValueError:
        return 0.5


def starts(x: RewardInput) -> float:
    return float(tagged(x).startswith(x.truth["answer"]))


def not_a_number(x: RewardInput) -> float:
    try:
        return 0.0 if abs(float(tagged(x)) - float(x.truth["answer"])) > 0.5 else 1.0
    except ValueError:
        return 0.0


def one_box_of_all(x: RewardInput) -> float:
    return float(x.truth["answer"] in re.findall(r"\\boxed\{([^{}]*)\}", x.response))


def set_without_count(x: RewardInput) -> float:
    said = {w.strip().lower() for w in tagged(x).split(",")}
    return len(said & set(x.truth["answer"])) / len(x.truth["answer"])


def best_letter(x: RewardInput) -> float:
    return float(x.truth["answer"] in re.findall(r"\b[A-D]\b", tagged(x)))


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
    "any of the letters": (best_letter, rows_of(CHOICES), {"every answer": "hole"}),
}  # fmt: skip


@pytest.mark.parametrize("name", HACKABLE)
def test_a_hackable_reward_is_caught_for_the_right_reason(name: str) -> None:
    reward, rows, reasons = HACKABLE[name]
    report = probe(reward, rows)
    assert reasons.items() <= findings(report).items(), findings(report)


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
        page_reward("docs/rewards.md", "overlap"),
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
