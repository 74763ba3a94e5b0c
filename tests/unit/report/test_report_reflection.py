"""Which metrics of reflection a report draws."""

from __future__ import annotations

from vlmrl.report.curves import reflection_names
from vlmrl.tasks.reflection import PREFIX, RATE, WORD


def line(rate: float, waits: float) -> dict[str, float | None]:
    return {
        "reward/mean": 0.5,
        f"{PREFIX}reflection_ratio": 0.0,
        f"{PREFIX}correct_ratio_in_no_reflection_texts": 0.5,
        f"{PREFIX}{RATE}": rate,
        f"{PREFIX}{WORD}wait": waits,
        f"{PREFIX}{WORD}recheck": 0.0,
    }


def test_a_run_without_a_word_of_reflection_draws_nothing_of_it():
    assert reflection_names([line(0.0, 0.0), line(0.0, 0.0)]) == ([], [])


def test_a_run_with_one_word_draws_ratios_rate_and_that_word():
    shares, words = reflection_names([line(0.0, 0.0), line(0.4, 2.0)])
    assert shares == [
        f"{PREFIX}reflection_ratio",
        f"{PREFIX}correct_ratio_in_no_reflection_texts",
        f"{PREFIX}{RATE}",
    ]
    assert words == [f"{PREFIX}{WORD}wait"]
