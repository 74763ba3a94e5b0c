"""Screens of an episode: by what it ended, its calls, and the share of the responses that a token limit cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from vlmrl.cli.progress import _step_parts
from vlmrl.cli.run_screens import _lines, _row, columns
from vlmrl.cli.try_ import _sample_line
from vlmrl.report.rollout_examples import turn_views
from vlmrl.report.rollout_text import ending_words, group_fields, sample_fields
from vlmrl.store.rollouts import read_turns, turns_text
from vlmrl.train.journal import group_metrics
from vlmrl.types import Call, Group, Row, Score, ScoredSample, Segment, Trajectory, Turn

OWN = Segment("assistant", (1, 2), True, (-1.0, -1.0))
BROKEN = "<tool_call>{</tool_call>"
TURNS = (
    Turn("assistant", "I look.", calls=(Call("zoom", {"n": 1}), Call("", {"text": BROKEN}))),
    Turn("tool", "error: the call cannot be read", errors=1),
    Turn("assistant", "the answer is red"),
)


def sample(ending: Any = None, finish: Any = "length", turns: tuple[Turn, ...] = (), number: int = 0) -> ScoredSample:
    trajectory = Trajectory("t", "p", 0, number, 0, 7, (1,), (OWN,), (), finish)
    return ScoredSample(trajectory, "the answer is red", Score(0.5, {}), turns=turns, ending=ending)


@pytest.mark.parametrize(
    ("ending", "finish", "words"),
    [
        (None, "stop", ""),
        (None, "length", "cut at the limit"),
        ("answer", "stop", ""),
        ("turn cut", "length", "cut at the limit"),
        ("token limit", "length", "ended by the token limit"),
        ("image limit", "length", "ended by the image limit"),
        ("time limit", "length", "ended by the time limit"),
        ("done", "stop", "ended by the environment"),
        ("environment", "stop", "its environment failed"),
    ],
)
def test_the_ending_is_named(ending: Any, finish: Any, words: str) -> None:
    fields = sample_fields(sample(ending, finish))
    assert ending_words(fields) == words and fields.get("ending") == ending
    line, shown = _sample_line(fields), "\n".join(_lines(group_fields(group(sample(ending, finish)))))
    assert (words in line and f"tokens, {words}," in shown) if words else ("(" not in line and "tokens, adv" in shown)


def group(*samples: ScoredSample) -> Group:
    return Group(Row("p", "s", "t", {}), "?", samples)


def test_the_table_of_a_step_counts_calls_errors_and_endings() -> None:
    fields = group_fields(group(sample("answer", "stop", TURNS), sample("answer", "stop", TURNS), sample("time limit")))
    assert _row(fields, True)[4:7] == ("4", "2", "answer 2, time limit 1")
    assert len(_row(fields, True)) == len(_row(fields, False)) + 3


def test_an_episode_is_printed_once_and_a_broken_call_in_words() -> None:
    one = sample("answer", "stop", TURNS)
    for text in (_sample_line(sample_fields(one)), "\n".join(_lines(group_fields(group(one))))):
        assert text.count("the answer is red") == 1
        assert 'assistant: I look.  calls zoom({"n": 1})  a call that cannot be read' in text and BROKEN not in text


def test_what_did_not_fit_is_stored_and_told() -> None:
    last = Turn("assistant", "I look.", calls=(Call("zoom", {"n": 1}),), unfit=5_151)
    assert read_turns(turns_text([last])) == (last,)
    one = sample("token limit", turns=(last,))
    for text in (_sample_line(sample_fields(one)), "\n".join(_lines(group_fields(group(one))))):
        assert 'calls zoom({"n": 1})  (what they return, 5,151 tokens, did not fit)' in text
    assert sample_fields(one)["turns"][0]["unfit"] == 5_151
    (view,) = turn_views([last], (), cast(Any, None), cast(Any, SimpleNamespace(acted=lambda *_: None)))
    assert view.facts == "what they return, 5,151 tokens, did not fit"


def test_the_share_of_cut_responses_counts_the_limits_of_tokens_alone() -> None:
    ends = ("turn cut", "token limit", "image limit", "image limit", "turn limit", "answer", "answer", "answer")
    samples = [sample(e, "stop" if e == "answer" else "length", TURNS, k) for k, e in enumerate(ends)]
    metrics = group_metrics([group(*samples)])
    assert metrics["rollout/truncated_share"] == 2 / 8
    parts = _step_parts({**metrics, "rollout/tokens_per_second": 1, "memory/peak_bytes": 1, "time/step_seconds": 1})
    at = parts.index("cut 25%")
    assert parts[at + 1 : at + 3] == ["turn limit 12%", "image limit 25%"]
    assert parts[at + 3].endswith("  calls 2.0 (50% failed)") and columns(metrics)["tool errors"] == "50%"
