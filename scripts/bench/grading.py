"""The math grader: right on the list of graded pairs, 300 grades a second on one core, and safe from answers that hang.

    python scripts/bench/grading.py [--grades 3000] [--good 1000] [--bombs 100] [--workers 2] [--json] [--smoke]

Three checks. *pairs*: every pair of tests/golden/math/pairs.jsonl, worked out by hand, is graded as it says; beside it
stands how often the published judge of MAYE agrees. *speed*: grades a second by the CPU clock of one process, where no
two answers are the same, so that nothing comes from a cache; the parser is warm, as it is in a worker. The second rate
is that of groups of 8 samples with 3 different answers. *bombs*: answers that would never end among good ones, as
training scores them. Every bomb must earn 0 with a note, and every good response the score that it has without bombs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from vlmrl.rewards.math.grader import make_grader
from vlmrl.rewards.scoring import Scorer
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import RewardInput, Score

PAIRS = Path(__file__).resolve().parents[2] / "tests" / "golden" / "math" / "pairs.jsonl"
LEAST_RATE = 300
"""Grades a second on one core that must be reached."""
MOST_BOMB_SECONDS = 5.0
"""Time limits of the two tries of one bomb together."""
FORMS = (
    ("{a}", "{a}"), ("{a}", "{b}"), ("{a}.5", r"\frac{{{c}}}{{2}}"), (r"{a}^\circ", "{a}"),
    ("{a} cm", r"{a}\text{{ cm}}"),
    (r"\frac{{{a}}}{{7}}", r"\dfrac{{{a}}}{{7}}"), (r"{a}\sqrt{{5}}", r"\sqrt{{5}}\cdot {a}"),
    (r"{a}\sqrt{{3}}", r"{b}\sqrt{{3}}"),
    (r"{a}\pi", r"{a} \pi"), (r"\frac{{{a}\pi}}{{4}}", r"\frac{{{a}}}{{4}}\pi"), (r"\{{{a}, {b}\}}", "{b}, {a}"),
    ("({a}, {b})", "({a}, {b})"), ("[{a}, {c})", r"{a} \le x < {c}"), ("{a}x+{b}", "{b}+{a}x"), ("B", "B. {a}"),
    (r"{a}\%", "{a}"), (r"\$ {a}", "{a}"), (r"{a}\frac{{1}}{{2}}", "{a}.5"), ("x={a}", "{a}"),
    (r"{a}\sqrt{{2}}", "{d:.3f}"),
)  # fmt: skip
"""(gold answer, response's answer) with numbers in place of a, b, c = 2a + 1 and d = a times the root of 2."""
THOUGHT = "<think>First the angle, then the side, then both again to be sure.</think> So the answer is $\\boxed{%s}$."


def responses(number: int, seed: int) -> Iterator[RewardInput]:
    """Different responses of all forms in turn; about four fifths of them are right."""
    rng = random.Random(seed)
    for index in range(number):
        gold, answer = FORMS[index % len(FORMS)]
        a, b = rng.randrange(10, 10**6), rng.randrange(10, 10**6)
        values = {"a": a, "b": b, "c": 2 * a + 1, "d": a * 2**0.5}
        yield RewardInput(THOUGHT % answer.format(**values), {"answer": gold.format(**values)}, num_tokens=40)


def bombs(number: int) -> Iterator[RewardInput]:
    """Answers that SymPy computes for hours, some of them in C code that no signal interrupts."""
    for index in range(number):
        function = ("sin", "cos", "tan")[index % 3]
        answer = (
            rf"\binom{{{99999999 + index}}}{{44444444}}"
            if index % 2
            else rf"\{function}(\exp(\exp(\exp(5)))) + {index}"
        )
        yield RewardInput(THOUGHT % answer, {"answer": "20"}, num_tokens=40)


def check_pairs() -> dict:
    """Count the pairs that `math` and the published judge grade as a person did."""
    grade = make_grader()
    pairs = [json.loads(line) for line in PAIRS.read_text("utf-8").splitlines()]
    given = [grade(RewardInput(p["response"], {"answer": p["gold"]})).parts["accuracy"] == 1.0 for p in pairs]
    right = sum(one == p["right"] for one, p in zip(given, pairs, strict=True))
    return {
        "pairs": len(pairs), "as_by_hand": right, "maye_as_by_hand": sum(p["maye"] == p["right"] for p in pairs),
        "maye_too_kind": sum(p["maye"] and not p["right"] for p in pairs),
        "maye_too_strict": sum(p["right"] and not p["maye"] for p in pairs), "holds": right == len(pairs),
    }  # fmt: skip


def rate(grade, inputs: Sequence[RewardInput]) -> float:
    """Grades a second by the CPU clock."""
    start = time.process_time()
    for x in inputs:
        grade(x)
    return len(inputs) / (time.process_time() - start)


def check_speed(grades: int, repeats: int) -> dict:
    """Median rates over the repeats."""
    grade = make_grader()
    rate(grade, list(responses(10 * len(FORMS), seed=10**6)))
    fresh = sorted(rate(grade, list(responses(grades, seed))) for seed in range(repeats))
    groups = []
    for seed in range(repeats):
        three = list(responses(3 * grades // 8, 1000 + seed))
        groups.append(rate(grade, [three[3 * (i // 8) + i % 8 % 3] for i in range(grades // 8 * 8)]))
    middle = repeats // 2
    return {
        "grades": grades, "per_second": round(fresh[middle]), "per_second_in_groups": round(sorted(groups)[middle]),
        "least": LEAST_RATE, "holds": fresh[middle] >= LEAST_RATE,
    }  # fmt: skip


def check_bombs(good: int, number: int, workers: int, seconds: float) -> dict:
    """Score good responses alone, then with bombs among them."""
    spec, calm = load_reward("math"), list(responses(good, seed=7))
    mixed: list[tuple[bool, RewardInput]] = [(False, x) for x in calm] + [(True, x) for x in bombs(number)]
    random.Random(0).shuffle(mixed)
    with Scorer(spec, workers=workers, timeout_seconds=seconds) as scorer:
        before = {x.response: score for x, score in zip(calm, scorer.score(calm), strict=True)}
        start = time.perf_counter()
        scores = scorer.score([x for _, x in mixed])
        wall = time.perf_counter() - start
    paired = [(is_bomb, x, score) for (is_bomb, x), score in zip(mixed, scores, strict=True)]
    priced = sum(is_bomb and _is_priced(score) for is_bomb, _, score in paired)
    unchanged = sum(not is_bomb and score == before[x.response] for is_bomb, x, score in paired)
    return {
        "good": good, "bombs": number, "workers": workers, "seconds_a_try": min(seconds, spec.timeout_seconds),
        "bombs_at_0_with_a_note": priced, "good_unchanged": unchanged,
        "good_right": sum(score.value == 1.0 for score in before.values()), "wall_seconds": round(wall, 1),
        "holds": priced == number and unchanged == good and 2 * spec.timeout_seconds <= MOST_BOMB_SECONDS,
    }  # fmt: skip


def _is_priced(score: Score) -> bool:
    return score.value == 0.0 and score.error is None and bool(score.note)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grades", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--good", type=int, default=1000)
    parser.add_argument("--bombs", type=int, default=100)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=2.5, help="time limit of one try of one response")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument(
        "--smoke", action="store_true", help="a toy size in seconds, to see that it runs; its rates mean nothing"
    )
    given = parser.parse_args()
    if given.smoke:
        given.grades, given.repeats, given.good, given.bombs, given.workers, given.seconds = 40, 1, 20, 1, 1, 1.0
    checks = {
        "pairs": check_pairs(),
        "speed": check_speed(given.grades, given.repeats),
        "bombs": check_bombs(given.good, given.bombs, given.workers, given.seconds),
    }
    holds = all(check["holds"] for name, check in checks.items() if not (given.smoke and name == "speed"))
    if given.json:
        print(json.dumps({**checks, "holds": holds}))
    else:
        for name, check in checks.items():
            print(f"{name:6} " + ", ".join(f"{key} {value}" for key, value in check.items()))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
