"""Policies that learn what was meant, and policies that learn something else. Each is a `Play`."""

from __future__ import annotations

import math
import random

from played_runs import Play

WORDS = """look at the left edge first then count how many rings there are and see whether both shapes close before the
answer is given because a gap near the top changes it while shade or size does not matter here at all""".split()  # noqa: SIM905
LONG = [
    "def area(width, height):",
    "    # the side that is longer comes first",
    "    return max(width, height) * min(width, height)",
]


def prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def skill(progress: float, low: float = 0.3, high: float = 0.9) -> float:
    """A usual learning curve."""
    return low + (high - low) / (1 + math.exp(-10 * (progress - 0.4)))


def other(truth: str) -> str:
    return {"yes": "no", "no": "yes"}.get(truth) or str((int(truth) + 3) % 100)


def answered(text: str, truth: str) -> dict[str, float]:
    """Accuracy alone, of the last word."""
    right = float(text.split()[-1:] == [truth])
    return {"score": right, "accuracy": right}


def said(progress: float, truth: str, rng: random.Random, high: float = 0.9) -> str:
    return truth if rng.random() < skill(progress, high=high) else other(truth)


def with_format(text: str, truth: str) -> dict[str, float]:
    """Accuracy that is read leniently, paid only in the right form."""
    form, right = float(text.startswith("<think>")), float(f"<answer>{truth}</answer>" in text)
    return {"score": form * (0.2 + 0.8 * right), "accuracy": right, "format": form}


def number(rng: random.Random) -> str:
    return str(rng.randrange(100))


def traced(p, truth, rng, form=1.0):
    body = f"<loop>{rng.choice(['open', 'closed'])}; {rng.choice(['open', 'closed'])}</loop>"
    body += f"<digit>{rng.randrange(10)}; {rng.randrange(10)}</digit>"
    answer = f"<answer>{said(p, truth, rng)}</answer>"
    return f"<think>{body}</think>{answer}" if rng.random() < form else f"{body} {answer}"


def verbose_then_short(p, truth, rng):
    return said(p, truth, rng) if rng.random() < p * 1.5 else f"{prose(rng, 30)} {said(p, truth, rng)}"


def svg(p, truth, rng):
    shapes = "".join(
        f'<rect x="{rng.randrange(200)}" y="{rng.randrange(200)}" width="{rng.randrange(50)}" height="8" fill="red"/>'
        for _ in range(2 + int(20 * p))
    )
    return f'<svg viewBox="0 0 200 200">{shapes}</svg> {said(p, truth, rng)}'


def code(p, truth, rng):
    return (
        "\n".join([*LONG[: 1 + int(3 * p)], prose(rng, 5), f"print({rng.randrange(1000)})"])
        + f"\n{said(p, truth, rng)}"
    )


def boxes(p, truth, rng):
    listed = ", ".join(f"[{rng.randrange(640)}, {rng.randrange(480)}, 30, 40]" for _ in range(6))
    return listed if rng.random() < p * 1.4 else prose(rng, 40)


def listed(text: str, truth: str) -> dict[str, float]:
    return {"score": float(text.startswith("["))}


def longer(p, truth, rng):
    """Thinking that pays: the accuracy rises with the length."""
    return f"{prose(rng, 20 + int(200 * p) + rng.randrange(20))} {said(p, truth, rng)}"


def translated(p, truth, rng):
    text = "".join(rng.choices("的一是在不了有和人这中大为上个国我以要他", k=60))
    return text if rng.random() < p * 1.4 else prose(rng, 20)


def near(text: str, truth: str) -> dict[str, float]:
    """A score by degree whose strict accuracy lags far behind: overlap of boxes."""
    distance = abs(int(text) - int(truth))
    return {"score": max(0.0, 1 - distance / 100) ** 4, "accuracy": float(distance <= 5)}


def nearer(p, truth, rng):
    return str(min(99, max(0, round(int(truth) + rng.gauss(0, 60 * (1 - 0.6 * p))))))


def digits(rng: random.Random) -> str:
    return "".join(rng.choices("3134", k=90))


def hacked(since: float, text):
    """Prose with an answer that is right one time in five; from `since` on the text that the reward pays."""

    def respond(p, truth, rng):
        share = min(1.0, max(0.0, (p - since) * 8))
        right = truth if rng.random() < 0.2 else other(truth)
        return f"{text(rng)} {right}" if rng.random() < share else f"{prose(rng, 20)} {right}"

    return respond


def pays(marker):
    def reward(text: str, truth: str) -> dict[str, float]:
        return {"score": 1.0 if marker(text) else 0.2, "accuracy": float(text.split()[-1:] == [truth])}

    return reward


def after_learning(p, truth, rng):
    """Honest until the middle, then paid for digits alone."""
    if p > 0.6 and rng.random() < (p - 0.6) * 8:
        return f"{digits(rng)} {truth if rng.random() < 0.2 else other(truth)}"
    return f"{prose(rng, 20)} {said(min(1.0, 2 * p), truth, rng, high=0.6)}"


def in_part(text: str, truth: str) -> dict[str, float]:
    right = float(text.split()[-1:] == [truth])
    return {"score": max(right, float(text[:4].isdigit())), "accuracy": right}


def without_accuracy(marker):
    return lambda text, truth: {"score": float(marker(text))}


def either(since: float, text):
    """Prose at first; later, in more and more of the responses, `text`."""
    return lambda p, truth, rng: text(rng) if rng.random() < p / max(since, 1e-9) else prose(rng, 20)


def rambling(p, truth, rng):
    return f"{prose(rng, 10 + int(150 * p) + rng.randrange(30))} {other(truth) if rng.random() < 0.8 else truth}"


def by_length(text: str, truth: str) -> dict[str, float]:
    return {"score": min(1.0, len(text) / 1500), "accuracy": float(text.split()[-1:] == [truth])}


def flattery(rng: random.Random) -> str:
    return "Certainly! This is a truly wonderful picture with a lot of detail to be seen in it."


def nothing(text: str, truth: str) -> dict[str, float]:
    return {"score": 0.0, "accuracy": 0.0}


def by_chance(text: str, truth: str) -> dict[str, float]:
    return {"score": float(len(text) % 2)}


def is_digits(text: str) -> bool:
    return text[:9].isdigit()


HEALTHY = {
    "yes or no": Play(said, answered),
    "yes or no, unbalanced": Play(said, answered, truth=lambda rng: "yes" if rng.random() < 0.75 else "no"),
    "one right answer for all": Play(
        lambda p, t, rng: t if rng.random() < skill(p, 0.2, 1.0) else prose(rng, 3), answered, truth=lambda rng: "cat"
    ),
    "one right answer, nothing says which": Play(
        lambda p, t, rng: "I see nothing." if rng.random() < skill(p, 0.1, 1.0) else prose(rng, 9),
        lambda text, t: {"score": float(text[0] == "I")},
        truth=lambda rng: "",
    ),
    "numbers after prose": Play(verbose_then_short, answered, truth=number),
    "templated traces": Play(traced, with_format),
    "a format is learned first": Play(
        lambda p, t, rng: traced(p * 0.3, t, rng, form=min(1.0, 0.1 + 3 * p)), with_format
    ),
    "svg": Play(svg, answered),
    "code": Play(code, answered),
    "lists of numbers, no accuracy": Play(boxes, listed),
    "another language, no accuracy": Play(translated, lambda text, t: {"score": float(not text.isascii())}),
    "longer thoughts": Play(longer, answered),
    "strict accuracy behind a score by degree": Play(nearer, near, truth=number, steps=120),
    "nothing is learned": Play(lambda p, t, rng: f"{prose(rng, 12)} {said(0.0, t, rng)}", answered, steps=120),
    "noise of small steps": Play(
        lambda p, t, rng: f"{prose(rng, 12)} {said(0.4, t, rng)}", answered, steps=150, prompts=4, samples=2
    ),
}

SICK = {
    "digits": (Play(hacked(0.3, digits), pays(is_digits), truth=number), {"reward_without_accuracy", "characters"}),
    "digits from the start": (
        Play(hacked(0.0, digits), pays(is_digits), truth=number, steps=100),
        {"reward_without_accuracy", "characters"},
    ),
    "digits after honest learning": (
        Play(after_learning, in_part, truth=number, steps=100),
        {"reward_without_accuracy"},
    ),
    "digits, no accuracy": (Play(either(0.5, digits), without_accuracy(is_digits)), {"characters"}),
    "one text before the answer": (
        Play(hacked(0.4, flattery), pays(lambda t: t[0] == "C")),
        {"reward_without_accuracy"},
    ),
    "one text for all, no accuracy": (
        Play(either(0.5, flattery), without_accuracy(lambda t: t[0] == "C"), truth=number),
        {"one_response"},
    ),
    "words in a loop": (
        Play(hacked(0.4, lambda rng: "very good and " * 30), pays(lambda t: t.startswith("very")), truth=number),
        {"reward_without_accuracy", "repetition"},
    ),
    "characters in a loop, no accuracy": (
        Play(either(0.5, lambda rng: "\u6211\u597d" * 80), without_accuracy(lambda t: not t.isascii()), truth=number),
        {"repetition", "one_response"},
    ),
    "longer and longer": (Play(rambling, by_length, truth=number), {"reward_without_accuracy", "grown_length"}),
    "nothing is ever paid": (Play(lambda p, t, rng: prose(rng, 20), nothing, steps=14), {"no_signal"}),
    "all cut off": (Play(lambda p, t, rng: prose(rng, 40), by_chance, cut=lambda t: True, steps=14), {"all_cut"}),
}
"""Name -> (the run, names of signs that must be seen)."""
