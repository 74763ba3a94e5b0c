"""Tables of episodes, as `vlmrl generate` writes them: what a reward gets of a line, and lines that have no score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vlmrl.evaluate.answer_files import Answer
from vlmrl.reward_check.response_tables import open_table
from vlmrl.reward_check.responses import Decoded
from vlmrl.store.rollouts import episode_fields
from vlmrl.types import Call, Media, Row, Sample, Segment, Turn

TURNS = (
    Turn("assistant", "I look.", calls=(Call("zoom", {"n": None}),)),
    Turn("tool", "here", (Media("a" * 64, 4, 2),), errors=1, seconds=0.5, seen_sizes=((28, 28),)),
    Turn("assistant", "red"),
)
OWN, SEEN = (1, 2, 3), (4, 5, 6, 7)
SEGMENTS = (
    Segment("assistant", OWN, True, (-1.0,) * 3),
    Segment("tool", SEEN, False, author="environment", media=TURNS[1].media),
    Segment("assistant", OWN, True, (-1.0,) * 3),
)


def line(**changes: Any) -> dict[str, Any]:
    more = {"ending": "answer", "measured": {"looks": 2.0}, **changes}
    sample = Sample((*OWN, *SEEN, *OWN), "I look.\nred", (), "stop", 0, 9, SEGMENTS, TURNS, **more)
    kept = {"tokens": list(sample.token_ids), "sample": 0, "text": sample.text, "finish": "length", "seed": 9}
    return Answer(0, Row("p", "s", "t", {"answer": "red"}), kept | episode_fields(sample)).line()


def decoded(path: Path, *rows: dict[str, Any]) -> Decoded:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = open_table(path).reader
    (chunk,) = reader.chunks()
    return reader.decode(chunk)


def test_a_reward_gets_of_a_line_what_it_got_of_the_episode(tmp_path: Path) -> None:
    (x,) = decoded(tmp_path / "a.jsonl", line()).inputs
    assert x.turns == TURNS and x.answer == "red" and x.measured == {"looks": 2.0} and x.truth["answer"] == "red"
    assert x.num_tokens == 6, "the policy's tokens alone, without the four of the tool"
    assert not {"turns", "measured"} & x.columns.keys()


def test_the_limits_of_tokens_alone_cut_a_response(tmp_path: Path) -> None:
    endings = ("turn cut", "image limit", "token limit", "time limit")
    facts = decoded(tmp_path / "a.jsonl", *(line(ending=ending) for ending in endings)).facts
    assert facts.cut_N.tolist() == [True, False, True, False]


def test_a_failed_environment_and_turns_of_another_form_have_no_score(tmp_path: Path) -> None:
    found = decoded(tmp_path / "a.jsonl", line(), line(fault="dict:80 is down"), line() | {"turns": [{"role": 1}]})
    assert len(found.inputs) == 1 and [one.where.rpartition(":")[2] for one in found.broken] == ["2", "3"]
    assert found.broken[0].why == "the environment failed: dict:80 is down"
    assert "`turns` or `measured` is not as `vlmrl generate` writes them" in found.broken[1].why


def test_a_column_of_that_name_which_is_no_episode_stays_a_column(tmp_path: Path) -> None:
    for turns in (3, ["what?", "why?"], [{"role": "user", "content": "what?"}]):
        own = {"turns": turns, "measured": 0.5, "fault": "crack", "truth": "a"}
        (x,) = decoded(tmp_path / "a.jsonl", {"response": "a", **own}).inputs
        assert (x.turns, x.measured) == ((), {}) and x.columns == own
