"""Inputs for the goldens of the rewards of counting, grounding, detection and we_math; see reward_cases.py."""

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
        "**4**", "There are 4 cubes.", "four (4)", "\\boxed{4}", "at least 4", "not 4", "2 + 2 = 4", "3-4",
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


BOX = {"box": [100.0, 200.0, 400.0, 600.0], "space": "thousand", "width": 640, "height": 480}
IN_PIXELS = {"box": [64.0, 96.0, 256.0, 288.0], "space": "pixels", "width": 640, "height": 480}


def box_inputs() -> Iterator[Input]:
    answers = (
        "[100, 200, 400, 600]", "(100,200),(400,600)", "[0.1, 0.2, 0.4, 0.6]", "[64, 96, 256, 288]",
        "[400, 600, 100, 200]", "[100, 200, 300, 600]", "[200, 300, 500, 700]", "[0, 0, 1000, 1000]", "[5, 5, 5, 5]",
        "[-9, -9, 9999, 9999]", "[3000, 3000, 4000, 4000]", "[nan, 0, 1, 1]", "[1, 2, 3]", "there", "",
        "[100, 200, 400, 600] [0, 0, 9, 9]", '{"bbox_2d": [100, 200, 400, 600], "label": "a"}',
        "{'bbox_xywh': [100, 200, 300, 400]}", '{"bbox": [100, 200, 400, 600], "label": "a [1, 2, 3, 4]"}',
        "<box>100 200 400 600</box>", "<loc0205><loc0102><loc0614><loc0410>", "[" * 300,
    )  # fmt: skip
    frames = (
        "<think>a</think><answer>{}</answer>", "<answer>{}</answer>", "{}", "<think>{}</think><answer>no</answer>",
        "<think>a</think>{}", "<|box_start|>{}<|box_end|>", "<think>a</think><answer>{}</answer> end",
    )  # fmt: skip
    for answer in answers:
        for frame in frames:
            yield given(frame.format(answer), BOX)
        yield given(frames[0].format(answer), IN_PIXELS)
        yield {**given(frames[0].format(answer), IN_PIXELS), "seen_sizes": [[320, 240]]}
    for change in ({"box": None}, {"box": [1, 2, 1, 4]}, {"space": "seen"}, {"width": 0}):
        yield given(frames[0].format(answers[0]), {**BOX, **change})
    yield given(frames[0].format(answers[0]), BOX, "length")


BOXES = {
    "boxes": [[100.0, 200.0, 400.0, 600.0], [500.0, 500.0, 900.0, 900.0]], "space": "thousand", "width": 640,
    "height": 480, "category": "cat", "count": 2,
}  # fmt: skip
BOXES_IN_PIXELS = {**BOXES, "boxes": [[64.0, 96.0, 256.0, 288.0]], "space": "pixels", "count": 1}
NO_BOXES = {**BOXES, "boxes": [], "count": 0}


def list_inputs() -> Iterator[Input]:
    one, other = "'Position': [100, 200, 400, 600]", "'Position': [500, 500, 900, 900]"
    answers = (
        f"[{{{one}, 'Confidence': 0.9}}, {{{other}, 'Confidence': 0.6}}]", f"[{{{one}, 'Confidence': 1}}]", "[]",
        "No Objects", f"[{{{one}, 'Confidence': 0.9}}, {{{one}, 'Confidence': 0.2}}]",
        f"[{{{one}, 'Confidence': -50}}]", f"[{{{one}}}]", "[{'Position': [9, 9, 20, 20], 'Confidence': 0}]",
        "[{'Position': [120, 200, 400, 600], 'Confidence': 0.55}]", "[{'Position': 5, 'Confidence': 1}]",
        "[{'Position': [1, null, 3, 4], 'Confidence': 1}]", '["cat", 3]', f"[{{{one}, 'Confidence': 0.9}}, 7]",
        '[{"bbox_2d": [0.1, 0.2, 0.4, 0.6], "label": "cat", "confidence": 0.5}]',
        '[{"bbox_2d": [64, 96, 256, 288], "confidence": 0.5, "label": "cat"}]',
        '[{"bbox_xywh": [100, 200, 300, 400], "label": "[1, 2, 3, 4]", "score": 0.5}]',
        "[{'bbox': [100, 200, 400, 600], 'Prob': '0.9'}, {'no Position, Confidence': 1}]",
        '[{"box": <loc0205><loc0102><loc0614><loc0410>, "confidence": 0.5}]', "[[100, 200, 400, 600]]", "there", "",
        f"[{', '.join([f'{{{one}, {chr(39)}Confidence{chr(39)}: 0.1}}'] * 101)}]", f"[{{{one}, 'Confidence': 0.9}}, {{",
    )  # fmt: skip
    frames = (
        "<think>a</think><answer>{}</answer>", "<answer>{}</answer>", "{}", "<think>a</think><answer>\n{}\n</answer> x",
        "<think>{}</think><answer>[]</answer>", "<think>a</think><answer>```json\n{}\n```</answer>",
    )  # fmt: skip
    for answer in answers:
        for frame in frames:
            yield given(frame.format(answer), BOXES)
        for truth in (NO_BOXES, BOXES_IN_PIXELS):
            yield given(frames[0].format(answer), truth)
        yield {**given(frames[0].format(answer), BOXES_IN_PIXELS), "seen_sizes": [[320, 240]]}
    for change in ({"boxes": None}, {"boxes": [[1, 2, 1, 4]]}, {"boxes": [5]}, {"space": "seen"}, {"width": 0}):
        yield given(frames[0].format(answers[0]), {**BOXES, **change})
    yield given(frames[0].format(answers[0]), BOXES, "length")


def we_math_inputs() -> Iterator[Input]:
    options = {"answer": "B", "options": "A. 300; B. 400; C. 500"}
    answers = (
        "B",
        "(b)",
        "B. 400",
        "B. 300",
        "Because",
        "B or C",
        "400",
        "",
        "8, 6, 7",
        "6 8 7",
        "1 2 3 4 5 6 7 8",
        "50",
    )
    frames = (
        "<think>a</think><answer>{}</answer>", "<answer>{}</answer>", "{}", "<think>Answer: {}</think>",
        "<think>a</think><answer>{}</answer><answer>9</answer>",
    )  # fmt: skip
    for answer in answers:
        for frame in frames:
            yield given(frame.format(answer), options)
            yield given(frame.format(answer), {"answer": "8, 6, 7"})
        yield given(frames[0].format(answer), {"answer": "50 or 130", "options": None})
    yield given(frames[0].format("B"), options, "length")
    yield given(frames[0].format("B"), {"answer": None})


def crop_inputs() -> Iterator[Input]:
    answers = ("rising", " Rising. ", "(B)", "b.", "B or C", "", "rising falling", "a" * 1001)
    frames = (
        "<think>a</think><answer>{}</answer>", "<answer>{}</answer>", "{}", "<think>a</think><answer>{}",
        "<think>a</think><answer>{}</answer><answer>x</answer>", "<think><answer>{}</answer></think>",
        "<tool_call>{}</tool_call>",
    )  # fmt: skip
    for answer in answers:
        for frame in frames:
            for truth in ("rising", "B"):
                yield given(frame.format(answer), {"answer": truth})
    yield given(frames[0].format("rising"), {"answer": None})
    yield given(frames[0].format("rising"), {"answer": "rising"}, "length")
    yield from episode_inputs()


def episode_inputs() -> Iterator[Input]:
    """One to four calls, some of which fail, and a right or a wrong last turn."""
    plain: dict[str, Any] = {"media": [], "calls": [], "errors": 0}
    call = {**plain, "role": "assistant", "text": "<tool_call>", "calls": [{"name": "zoom", "arguments": {}}]}
    for number in range(5):
        for errors in (0, 1):
            for last in ("<think>a</think><answer>rising</answer>", "<answer>no</answer>", ""):
                turns = [call, {**plain, "role": "tool", "text": "image 1", "errors": errors}] * number
                turns.append({**plain, "role": "assistant", "text": last})
                text = "\n".join(turn["text"] for turn in turns if turn["role"] == "assistant")
                yield {**given(text, {"answer": "rising"}), "turns": turns}


def step_inputs() -> Iterator[Input]:
    """Steps of the task agent_code, but code, which goldens do not run."""
    truths: list[dict[str, Any]] = [
        {"answer": ["red circle", "circle"]},
        {"answer": "a red, circle"},
        {"step": "answer", "answer": ["???"]},
        {"step": "problem", "damage": ["dark", "rotation90"]},
        {"step": "problem", "damage": ["none"]},
        {"step": "problem"},
        {"step": "x"},
        {"answer": []},
    ]
    texts = ("red circle", "circle red red", "???", "", "{'dark', 'rotation90'}", "{'rotation90'}", "none")
    forms = ("<think>t</think><{0}>{1}</{0}>", "<{0}>{1}</{0}>", "{1}", "<{0}>{1}", "a<{0}>{1}</{0}><{0}>b</{0}>")
    for truth in truths:
        for text in texts:
            for tag in ("answer", "problem"):
                for form in forms:
                    yield given(form.format(tag, text), truth)


def search_inputs() -> Iterator[Input]:
    """Steps of the task agent_search: queries and answers, in tags that are nested, doubled, cut and of other steps."""
    truths: list[dict[str, Any]] = [
        {"answer": ["The Eiffel Tower", "Eiffel"]},
        {"step": "answer", "answer": "very very big"},
        {"step": "answer", "answer": ["the"]},
        {"step": "search", "query": "mayor of Paris"},
        {"step": "search", "query": ""},
        {"step": "code", "answer": ["x"]},
        {"answer": []},
    ]
    texts = ("Eiffel Tower", "very very big", "the", "", "mayor of Paris", "Paris\nmayor", "<|im_end|>Eiffel")
    forms = (
        "<think>t</think><{0}>{1}</{0}>", "<{0}>{1}</{0}>", "{1}", "<{0}>{1}", "a<{0}>{1}</{0}><{0}>b</{0}>",
        "<think>t</think><{0}>{1}</{0}><search>{1}</search>", "<think><{0}>{1}</{0}></think>",
        "<{0}><{0}>{1}</{0}></{0}>", "<think>t</think><{0}>{1}</{0}> and more",
    )  # fmt: skip
    for truth in truths:
        for text in texts:
            for tag in ("answer", "search"):
                for form in forms:
                    yield given(form.format(tag, text), truth)
    yield given("<think>t</think><answer>Eiffel</answer>", truths[0], "length")


def measured_inputs() -> Iterator[Input]:
    """Episodes with what an environment has measured, and one turn without any."""
    for measured in ({"reward": 1.0, "actions": 2.0}, {"reward": 0.25}, {"reward": 0.0}, {"actions": 2.0}, {}):
        yield {**given("done", {}), "measured": measured}


TASK_CASES: dict[str, tuple[list[dict[str, Any]], list[Input]]] = {
    "count": ([{}, {"thought": "optional"}], list(count_inputs())),
    "rllava_count": ([{}, {"format_weight": 0.25}], list(count_inputs())),
    "box_iou": (
        [
            {"space": "thousand"},
            {"space": "pixels", "thought": "optional"},
            {"space": "seen"},
            {"space": "unit", "place": "response", "power": 2.0},
            {"space": "loc", "least": 0.5},
            {"space": "thousand", "order": "xywh"},
        ],
        list(box_inputs()),
    ),
    "box_list": (
        [
            {"space": "thousand"},
            {"space": "pixels", "thought": "optional"},
            {"space": "seen", "least": 0.75},
            {"space": "unit"},
            {"space": "loc"},
            {"space": "thousand", "order": "xywh"},
        ],
        list(list_inputs()),
    ),
    "rllava_boxes": ([{}], list(list_inputs())),
    "we_math": ([{}, {"thought": "optional"}], list(we_math_inputs())),
    "rllava_we_math": ([{}, {"format_weight": 0.5}], list(we_math_inputs())),
    "rllava_box": ([{}, {"format_weight": 0.25}], list(box_inputs())),
    "crop": ([{}, {"thought": "optional"}], list(crop_inputs())),
    "rllava_crop": ([{}], list(crop_inputs())),
    "agent_code": ([{}, {"thought": "optional"}], list(step_inputs())),
    "rllava_agent_code": ([{}], list(step_inputs())),
    "rllava_agent_code_episodes": ([{}], list(episode_inputs())),
    "agent_search": ([{}, {"thought": "optional"}], list(search_inputs())),
    "rllava_agent_search": ([{}], list(search_inputs())),
    "rllava_agent_search_episodes": ([{}], list(episode_inputs())),
    "tool_use": ([{}], list(episode_inputs())),
    "environment_reward": ([{}], list(measured_inputs())),
}
