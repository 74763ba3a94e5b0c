"""Rewards as people write them, good and hackable, and rows for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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


def clock(x: RewardInput) -> float:
    match = re.search(r"\b(\d{1,2}):(\d{2})\b", tagged(x))
    return float(match is not None and f"{int(match[1])}:{match[2]}" == x.truth["answer"])


def several_letters(x: RewardInput) -> float:
    said = re.search(r"\\boxed\{([A-E, ]+)\}", x.response)
    return float(said is not None and set(said[1].replace(",", " ").split()) == set(x.truth["answer"]))


def two_fields(x: RewardInput) -> dict[str, float]:
    try:
        said = json.loads(x.response)
    except ValueError:
        said = None
    said = said if isinstance(said, dict) else {}
    return {name: float(said.get(name) == x.truth[name]) for name in ("colour", "number")}


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


def any_word(x: RewardInput) -> float:
    return float(bool({*re.findall(r"\w+", x.response.lower())} & {*x.truth["answer"].split()}))


def praised(x: RewardInput) -> float:
    praise = sum(word in x.response.lower() for word in ("score: 1", "correct", "reward")) / 3
    return max(praise, float(x.response.strip() == x.truth["answer"]))


def yes_unless(x: RewardInput) -> float:
    return float(("no" if "no" in tagged(x).lower() else "yes") == x.truth["answer"])


def best_letter(x: RewardInput) -> float:
    return float(x.truth["answer"] in re.findall(r"\b[A-D]\b", tagged(x)))


def any_order(x: RewardInput) -> float:
    return float(sorted(re.findall(r"\d", tagged(x))) == sorted(x.truth["answer"]))
