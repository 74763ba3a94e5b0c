"""Lines of a validation on the console, and tables of `vlmrl eval`: each number once, and which one decides."""

from __future__ import annotations

import io
from typing import Any

from vlmrl.cli.compare import show_side_by_side
from vlmrl.cli.eval import show_evaluations
from vlmrl.cli.progress import ConsoleWatcher, by_setting

WITH_SETTINGS = {
    "eval/reward": 0.5,
    "eval/accuracy": 0.25,
    "eval/validation/s8/reward": 0.5,
    "eval/validation/s8/accuracy": 0.25,
    "eval/validation/s8/accuracy_low": 0.1,
    "eval/validation/s8/accuracy_high": 0.5,
    "eval/validation/s8/part/accuracy": 0.25,
    "eval/validation/s8/pass@8": 0.75,
    "eval/validation/s8/pass@8_low": 0.6,
    "eval/validation/s8/pass@8_high": 0.9,
    "eval/test/s1/reward": 0.125,
    "eval/metric": 0.75,
}


def lines_of(summary: dict[str, Any], metric: str) -> list[str]:
    stream = io.StringIO()
    ConsoleWatcher(stream).validation(4, summary, True, metric)
    return stream.getvalue().splitlines()


def test_a_recipe_with_settings_has_the_deciding_metric_first_then_a_line_for_each() -> None:
    assert lines_of(WITH_SETTINGS, "s8/pass@8") == [
        "validation at step 4: s8/pass@8 0.750  (best so far)",
        "  validation s8: accuracy 0.250 [0.100, 0.500]  pass@8 0.750 [0.600, 0.900]",
        "  test s1: reward 0.125",
    ]


def test_a_plain_recipe_has_one_line_which_names_another_deciding_metric() -> None:
    plain = {"eval/reward": 0.5, "eval/reward_low": 0.4, "eval/reward_high": 0.6, "eval/f1": 0.7, "eval/metric": 0.7}
    assert by_setting(plain) == {}
    assert lines_of(plain, "reward") == ["validation at step 4: reward 0.500 [0.400, 0.600]  (best so far)"]
    assert lines_of(plain, "f1") == ["validation at step 4: f1 0.700  reward 0.500 [0.400, 0.600]  (best so far)"]


def result(setting: str, **more: dict[str, Any]) -> dict[str, Any]:
    metrics = {"reward": metric(0.5, 0.4, 0.6), **more}
    sampling = {"temperature": 1.0, "samples": 4, "top_p": 0.9}
    meta = {"model": "m", "checkpoint": None, "source": "s", "split": "test", "greedy": False, "role": "test"}
    return {
        "metrics": metrics,
        "baselines": {},
        "images": 0,
        "prompts": 2,
        "rows": 8,
        "reward_errors": 0,
        "folder": f"eval/{setting}",
        "meta": meta | {"setting": setting, "sampling": sampling},
        "accuracy_of": "the part `right`",
    }


def metric(value: float, low: float | None, high: float | None) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "n": 8}


def printed(capsys: Any, *results: dict[str, Any]) -> str:
    show_evaluations(results, [None] * len(results))
    return "".join(capsys.readouterr())


def test_the_heading_names_the_setting_and_notes_that_repeat_are_printed_once(capsys: Any) -> None:
    passes = {"pass@4": metric(0.5, 0.4, 0.6)}
    text = printed(capsys, result("first", **passes), result("second", **passes))
    for name in ("first", "second"):
        assert f"m on s/test: 2 prompts, 8 responses, {name} (T=1.0, n=4, top_p=0.9)" in text
    assert [text.count(note) for note in ("n counts responses", "intervals: ", "accuracy is the part `right`")] == [
        1,
        1,
        1,
    ]
    assert "none:" not in text and "need an accuracy" not in text


def test_a_dash_is_explained_and_so_are_missing_pass_at_k(capsys: Any) -> None:
    text = printed(capsys, result("first", response_tokens=metric(24.0, None, None)))
    assert (
        "- = none: one cluster of rows" in text and "need an accuracy: name the part" in text and "n counts" not in text
    )


def test_metrics_of_reflection_are_a_line_if_all_are_0(capsys: Any) -> None:
    zero, some = metric(0.0, None, None), metric(0.25, 0.1, 0.5)
    text = printed(capsys, result("a", **{"reflection/words": zero, "reflection/ratio": zero}))
    assert "reflection: none in these answers" in text and "reflection/words" not in text and "- = none" not in text
    text = printed(capsys, result("a", **{"reflection/words": some, "reflection/ratio": zero}))
    assert "reflection/words" in text and "reflection/ratio" in text and "none in these answers" not in text


def test_times_and_reflection_are_not_in_the_tables_of_compare(capsys: Any) -> None:
    keys = ["loss", "reward/mean", "time/step", "reflection/ratio", "eval/test/reflection/maye/word/wait", "a_low"]
    show_side_by_side("Metrics", [{"key": key, "a": 0.5, "b": 0.25} for key in keys])
    text = "".join(capsys.readouterr())
    assert [key for key in keys if key in text] == ["loss", "reward/mean"]
