"""Inputs for the goldens of the rewards of the tasks counting and grounding; see reward_cases.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Input = dict[str, Any]


def given(response: str, truth: dict[str, Any], finish: str = "stop") -> Input:
    return {"response": response, "truth": truth, "columns": {}, "finish": finish, "num_tokens": 0}


def count_inputs() -> Iterator[Input]:
    answers = (
        "4", " 4 ", "4.0", "+4", "04", "4.", "5", "0", "400", "-4", "4.5", "four", "4 feet", "4%", "$4$", "(4)", "2+2",
        "1,004", "3 or 4", "4 4", "", "nan", "inf", "9" * 400, "\u0664", "4e0",
    )  # fmt: skip
    frames = (
        "<think>a</think><answer>{}</answer>", "<answer>{}</answer>", "{}", "<think></think>\n<answer>{}</answer>",
        "<think>a</think><answer>{}</answer><answer>9</answer>", "<think>a</think><answer>{}", "x<answer>{}</answer>",
        "<think><answer>9</answer></think><answer>{}</answer>", "<THINK>a</THINK><answer>{}</answer> end",
    )  # fmt: skip
    for answer in answers:
        for frame in frames:
            yield given(frame.format(answer), {"answer": 4})
    for truth in (0, 1004, None, "4", -1, True):
        yield given(frames[0].format("4"), {"answer": truth})
        yield given(frames[0].format("0"), {"answer": truth})
    yield given(frames[0].format("4"), {"answer": 4}, "length")


TASK_CASES: dict[str, tuple[list[dict[str, Any]], list[Input]]] = {
    "count": ([{}, {"thought": "optional"}], list(count_inputs())),
    "rllava_count": ([{}, {"format_weight": 0.25}], list(count_inputs())),
}
