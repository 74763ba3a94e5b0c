"""Turns of episodes on the report's page: tokens, seconds and errors of each, and which filters show a response."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vlmrl.report.page_parts import BoxView, Picture
from vlmrl.report.rollout_examples import Album, choose_groups, turn_views, view_group
from vlmrl.types import Call, Group, Media, Row, Score, ScoredSample, Segment, Trajectory, Turn

NO_IMAGES: Any = SimpleNamespace(find=lambda media: None)
OWN = Segment("assistant", (1, 2), True, (-1.0, -1.0))
SEEN = Segment("tool", (3, 4, 5), False, author="environment")
TURNS = (
    Turn("assistant", "<b>look</b>", calls=(Call("zoom", {"n": 1}),)),
    Turn("tool", "error: no", (Media("a" * 64, 4, 2),), errors=1, seconds=0.25),
    Turn("assistant", "red"),
)


def sample(
    turns=TURNS, segments=(OWN, SEEN, OWN), ending: Any = "answer", number=0, finish: Any = "stop"
) -> ScoredSample:
    trajectory = Trajectory("t", "p", 0, number, 0, 7, (1,), segments, (), finish)
    return ScoredSample(trajectory, "a", Score(0.5, {}), turns=turns, ending=ending)


def test_a_turn_has_its_tokens_seconds_errors_and_author():
    views = turn_views(TURNS, (OWN, SEEN, OWN), NO_IMAGES, Album())
    assert [(v.facts, v.trained, v.errors) for v in views] == [
        ("2 tokens", True, 0), ("3 tokens, 0.250 s, 1 error", False, 1), ("2 tokens", True, 0)
    ]  # fmt: skip
    assert views[0].calls == ['zoom({"n": 1})'] and "<b>look" not in views[0].text
    assert [p.note for p in views[1].pictures] == ["image not found"]


def test_a_reset_that_shows_nothing_has_tokens_and_no_turn_and_an_evaluation_knows_no_tokens():
    opening = Segment("user", (9,), False, author="environment")
    views = turn_views(TURNS, (opening, OWN, SEEN, OWN), NO_IMAGES, Album())
    assert [v.facts.split(",")[0] for v in views] == ["2 tokens", "3 tokens", "2 tokens"]
    assert [(v.facts, v.trained) for v in turn_views(TURNS, (), NO_IMAGES, Album())] == [
        ("", None), ("0.250 s, 1 error", None), ("", None)
    ]  # fmt: skip
    assert turn_views((), (OWN,), NO_IMAGES, Album()) == []


def test_filters_show_responses_with_tool_errors_and_those_that_a_limit_ended():
    fine = (Turn("assistant", "red"),)
    samples = (
        sample(),
        sample(fine, (OWN,), "token limit", 1, "length"),
        sample(TURNS, ending="turn cut", number=2, finish="length"),
        sample(fine, (OWN,), number=3),
        sample((), (OWN,), None, 4, "length"),
    )
    view = view_group(Group(Row("p", "s", "t", {}), "?", samples), "best", NO_IMAGES, Album())
    names = {s.number: s.filters for s in view.samples}
    assert names == {0: "tool-errors", 1: "limit-reached", 2: "tool-errors limit-reached", 3: "", 4: ""}


def test_the_group_with_the_most_tool_errors_is_an_example():
    groups = [Group(Row(str(i), "s", "t", {}), "?", (sample(turns),)) for i, turns in enumerate([(), TURNS, ()])]
    assert choose_groups(groups, seed=0)[0] == ("most tool errors", groups[1])
    assert "most tool errors" not in dict(choose_groups(groups[::2], seed=0))


def test_places_of_calls_are_marked_in_the_picture_that_the_model_saw_last():
    prompt, later = Media("a" * 64, 448, 224), Media("b" * 64, 100, 100)
    click = lambda x, y: Call("click", {"x": x, "y": y})  # noqa: E731
    turns = (
        Turn("assistant", "", calls=(click(500, 250), click("no", 1), Call("scroll", {"dy": 9}))),
        Turn("tool", "", (later,), seen_sizes=((50, 50),)),
        Turn("assistant", "", calls=(click(5, 10),)),
        Turn("tool", ""),
        Turn("assistant", "done"),
    )
    album = Album(spaces={"s": "thousand"})
    album.pictures = {one.sha256: Picture(one.sha256, one.width, one.height) for one in (prompt, later)}
    views = turn_views(turns, (), NO_IMAGES, album, "s", album.acted("s", (prompt,)))
    ((first,), (), (second,), (), ()) = ([(o.picture.key, o.boxes) for o in view.places] for view in views)
    # 500 of 1000 of 448 pixels is 224, 250 of 1000 of 224 is 56; the box is 5% of each side.
    assert first[0] == prompt.sha256 and first[1] == [BoxView("answer", 212.8, 50.4, 22.4, 11.2, "click")]
    assert second[0] == later.sha256 and second[1] == [BoxView("answer", 0.0, 0.0, 3.0, 3.5, "click")]
    album.spaces = {"s": "seen"}
    views = turn_views(turns, (), NO_IMAGES, album, "s", album.acted("s", (prompt,), ((1000, 1000),)))
    assert views[0].places[0].boxes == first[1], "pixels of 1000 x 1000"
    # 5 of 50 pixels of the later picture are 10 of its 100
    assert views[2].places[0].boxes == [BoxView("answer", 7.5, 17.5, 5.0, 5.0, "click")]
    assert [view.places for view in turn_views(turns, (), NO_IMAGES, album)] == [()] * 5
