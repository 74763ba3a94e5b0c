"""The task gui in the real browser: pages, demonstrations, the goal, coordinates, processes and a killed browser."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from vlmrl.browser.client import Browser, BrowserServer
from vlmrl.environments.base import EnvironmentLimits, EnvironmentUnavailable, Start
from vlmrl.environments.calls import write_call
from vlmrl.environments.processes import Answer, Beginning, EnvironmentPool, Stopped, load_environment
from vlmrl.environments.tools import ToolError, bind, tools_of
from vlmrl.errors import DataError, RewardError
from vlmrl.reward_check.probe import probe_reward
from vlmrl.tasks import make_task
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.tasks.gui.environment import PLACE, Page, draw_row, draw_splits, holds
from vlmrl.tasks.gui.kinds import KINDS, UNSEEN
from vlmrl.tasks.gui.task import VARIANTS, gui_task, prep
from vlmrl.types import Call, Media, RewardInput, Row, Turn

SIDE = 224
SEEN = (112, 112)


@pytest.fixture(scope="module")
def server() -> Iterator[BrowserServer]:
    with BrowserServer() as server:
        Page.server = server
        yield server
    Page.server = None


@pytest.fixture(scope="module")
def rows(server: BrowserServer) -> dict[str, Any]:
    """A row of each kind."""
    new = dict[str, Any]()
    with Browser(server.address) as browser, browser.tab(SIDE, SIDE) as tab:
        for kind in KINDS:
            drawn = (draw_row(tab, kind, SIDE, random.Random(f"{kind} {number}")) for number in range(9))
            new[kind] = next(row for row in drawn if row is not None)
    return new


def row_of(new: Any) -> Row:
    return Row("p", "s", "gui", new.truth, (Media("a" * 64, SIDE, SIDE),), new.columns)


def opened(new: Any, space: str = "thousand") -> Page:
    page = Page(space)
    page.reset(*(new.truth[name] for name in ("page", "goal", "side")))
    return page


def act(page: Page, call: Call) -> Any:
    tool = tools_of(page)[call.name]
    hidden = {"start": Start(seen_sizes=(SEEN,))} if call.name in ("click", "scroll") else {}
    return tool(**bind(tool, call.arguments, hidden=(Start,)), **hidden)


def calls_of(new: Any, space: str = "thousand") -> list[Call]:
    turns = make_task("gui", {}, space).correct_turns(row_of(new), random.Random(0), (SEEN,))
    calls = [part for turn in turns for part in turn if isinstance(part, Call)]  # type: ignore[union-attr]
    assert len(calls) == len(turns) - 1 and turns[-1] == ("<think>It is done.</think><answer>done</answer>",)
    return calls


def pixels(seen: Any) -> np.ndarray:
    return np.asarray(seen.images[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_demonstration_of_each_kind_reaches_its_goal_and_nothing_else_does(kind: str, rows: dict[str, Any]) -> None:
    new = rows[kind]
    page = opened(new)
    first = page.screenshot()
    assert np.array_equal(pixels(first), np.asarray(Image.open(io.BytesIO(new.images[0])))), "the prompt's picture"
    assert page.get_reward() == 0.0
    act(page, Call("click", {"x": 995, "y": 995}))
    assert page.get_reward() == 0.0
    page = opened(new)
    for call in calls_of(new):
        assert page.get_reward() == 0.0, "it needs all of its actions"
        seen = act(page, call)
    assert page.get_reward() == 1.0 and seen.measured == {"actions": len(calls_of(new)), "reached": 1.0}


def test_same_actions_give_the_same_pictures(rows: dict[str, Any]) -> None:
    for kind in ("login", "scroll", "menu", "calendar"):
        first, again = ([pixels(act(page, call)) for call in calls_of(rows[kind])] for page in
                        (opened(rows[kind]), opened(rows[kind])))  # fmt: skip
        assert all(map(np.array_equal, first, again)) and len(first) > 1
        assert not np.array_equal(first[0], first[-1]), "an action shows"


@pytest.mark.parametrize("space", ["thousand", "seen", "pixels", "unit"])
def test_places_of_each_space_hit_the_same_element(space: str, rows: dict[str, Any]) -> None:
    """At 224 pixels the model sees 112: a pixel that it sees is two of the page, and 1,000 are 224."""
    for kind in ("button", "scroll"):
        page = opened(rows[kind], space)
        for call in calls_of(rows[kind], space):
            act(page, call)
        assert page.get_reward() == 1.0
    ((_, (x, y)),) = json.loads(rows["button"].truth["actions"])
    (call,) = calls_of(rows["button"], space)
    scale = {"thousand": 1000 / SIDE, "seen": 0.5, "pixels": 1, "unit": 1 / SIDE}[space]
    assert call.arguments == pytest.approx({"x": x * scale, "y": y * scale}, abs=0.001 if space == "unit" else 0.51)


def test_a_wrong_last_click_undoes_success(rows: dict[str, Any]) -> None:
    new = rows["button"]
    page, name = opened(new, "pixels"), json.loads(new.truth["goal"])["pressed"]
    (call,) = calls_of(new, "pixels")
    act(page, call)
    assert page.get_reward() == 1.0
    other = json.dumps(f'[data-n]:not([data-n="{name}"])')
    x, y, _ = page._tab.value(f"{PLACE}({other})")
    seen = act(page, Call("click", {"x": x, "y": y}))
    assert page.get_reward() == 0.0 and seen.measured["reached"] == 1.0
    act(page, call)
    assert page.get_reward() == 1.0, "it can be made good"


def test_more_than_what_is_asked_for_is_wrong(rows: dict[str, Any]) -> None:
    """A second field that is filled in spoils the first one, and an empty one makes it good again."""
    new = rows["field"]
    page = opened(new, "pixels")
    for call in calls_of(new, "pixels"):
        act(page, call)
    assert page.get_reward() == 1.0
    (name,) = json.loads(new.truth["goal"])
    other = json.dumps(f'input:not([data-n="{name}"])')
    x, y, _ = page._tab.value(f"{PLACE}({other})")
    for call, reward in (
        (Call("click", {"x": x, "y": y}), 1.0), (Call("type", {"text": "x"}), 0.0),
        (Call("press", {"key": "Escape"}), 0.0), (Call("press", {"key": "Backspace"}), 1.0),
    ):  # fmt: skip
        act(page, call)
        assert page.get_reward() == reward, call


def test_what_cannot_be_done_is_told_to_the_model(rows: dict[str, Any]) -> None:
    page = opened(rows["field"], "pixels")
    for call in (
        Call("click", {"x": SIDE, "y": 3}), Call("click", {"x": 3, "y": -1}), Call("type", {"text": "a\nb"}),
        Call("type", {"text": "a" * 201}), Call("press", {"key": "F5"}), Call("type", {"text": ""}),
    ):  # fmt: skip
        with pytest.raises(ToolError):
            act(page, call)
    act(page, Call("scroll", {"dy": 1e300}))
    with pytest.raises(RewardError, match="coordinate space"):
        Page("inches")


def test_rows_of_a_split_and_kinds_that_only_the_test_split_has(server: BrowserServer) -> None:
    counts, kinds = {"train": 2, "validation": 1, "test": 2}, {"train": ["button", "radio"], "test": ["button", "keys"]}
    kinds["validation"] = kinds["train"]
    first, again = (draw_splits(counts, kinds, SIDE, seed=5) for _ in range(2))
    assert first == again
    assert [row.truth["kind"] for row in first["train"]] == ["button", "radio"]
    assert {row.truth["kind"]: row.truth["group"] for row in first["test"]} == {"button": "known", "keys": "unseen"}
    assert {row.truth["group"] for row in first["train"] + first["validation"]} == {"known"}
    pages = [row.truth["page"] for split in first.values() for row in split]
    assert len(set(pages)) == 5


def test_options_of_prep(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("vlmrl.tasks.gui.environment.draw_splits", lambda *args: given.append(args))
    prep(20)
    prep(20, kinds="colour, keys", unseen="keys")
    known = [kind for kind in KINDS if kind not in UNSEEN]
    assert given[0][:2] == (
        {"train": 20, "validation": 20, "test": 40},
        {"train": known, "validation": known, "test": tuple(KINDS)},
    )
    assert given[1][1] == {"train": ["colour"], "validation": ["colour"], "test": ("colour", "keys")}
    assert len(UNSEEN) >= 4 and len(KINDS) >= 14
    with pytest.raises(DataError, match="leave no kind"):
        prep(20, kinds="keys")
    with pytest.raises(DataError, match="names `keyz`"):
        prep(20, kinds="keyz")


class Place:
    """A pool of real processes, and a way to ask it for one answer."""

    def __init__(self) -> None:
        environment = load_environment(f"{gui_task({}).environments}:Page", {"space": "pixels", "seconds": 2.0})
        self.pool = EnvironmentPool(environment, "hermes", EnvironmentLimits())

    def begin(self, new: Any, key: int = 0) -> Answer | Stopped:
        facts = {"columns": {}, "truth": dict(new.truth), "images": [], "seen_sizes": [], "seed": 1, "prompt": "p"}
        self.pool.begin(key, Beginning(**facts))  # type: ignore[arg-type]
        return self.only()

    def turn(self, text: str, key: int = 0) -> Answer | Stopped:
        self.pool.turn(key, text)
        return self.only()

    def only(self) -> Answer | Stopped:
        ((_, outcome),) = self.pool.advance()
        return outcome


def test_an_episode_in_its_processes_and_one_whose_browser_is_killed(rows: dict[str, Any]) -> None:
    before = set(psutil.Process().children(recursive=True))
    place = Place()
    try:
        new = rows["login"]
        assert isinstance(answer := place.begin(new), Answer) and answer.parts == []
        for call in calls_of(new, "pixels"):
            answer = place.turn(write_call(call, "hermes"))
            assert isinstance(answer, Answer) and answer.errors == 0 and answer.done is None, "the goal ends nothing"
            assert [type(part) for part in answer.parts] == [bytes]
        assert answer.measured == {"actions": 5.0, "reached": 1.0}
        assert isinstance(answer := place.turn("done"), Answer) and answer.done == "answer"
        place.pool.finish(0)
        assert isinstance(answer := place.only(), Answer) and answer.measured == {"reward": 1.0}
        place.pool.drop(0)
        place.begin(new)
        for process in set(psutil.Process().children(recursive=True)) - before:
            with suppress(psutil.Error):
                words = " ".join(process.cmdline())
                if "--remote-debugging-pipe" in words and "--type=" not in words:
                    process.kill()
        outcome = place.turn(write_call(Call("screenshot", {}), "hermes"))
        assert isinstance(outcome, Stopped) and outcome.is_outage and "the browser ended" in outcome.why
        place.pool.drop(0)
        assert isinstance(place.begin(new), Answer), "the next episode has another browser"
    finally:
        place.pool.close()


def test_a_browser_that_cannot_be_reached_is_an_outage(rows: dict[str, Any], server: BrowserServer) -> None:
    other = BrowserServer()
    other.close()
    Page.server = other
    try:
        with pytest.raises(EnvironmentUnavailable, match="opens no page"):
            opened(rows["button"])
    finally:
        Page.server = server


def test_no_trick_earns_anything_in_the_page(server: BrowserServer, rows: dict[str, Any]) -> None:
    task = make_task("gui", {}, "thousand")
    inputs = [RewardInput("", row.truth, measured={"reward": 0.0}) for row in rows.values()]
    spec = load_reward("environment_reward")
    found = probe_reward(spec, spec.weights, inputs, more=task.attacks(inputs))
    assert found["flagged"] == 0
    grid = next(one for one in task.attacks(inputs) if one.name == "hundred clicks")
    with Browser(server.address) as browser, browser.tab(SIDE, SIDE) as tab:
        for kind, new in ((kind, rows[kind]) for kind in ("button", "stepper", "radio")):
            tab.load(new.truth["page"])
            calls = [call for turn in grid.episode(inputs[0]) for call in turn.calls]  # type: ignore[misc]
            for call in calls:
                tab.click(call.arguments["x"] * SIDE / 1000, call.arguments["y"] * SIDE / 1000)
            assert len(calls) == 100 and not holds(tab, json.loads(new.truth["goal"])), kind


def test_the_reward_of_an_environment() -> None:
    spec = load_reward("environment_reward")
    assert dict(spec(RewardInput("", {}, measured={"reward": 0.5}))) == {"environment": 0.5}
    assert dict(spec(RewardInput("", {}, turns=(Turn("assistant", "a"),)))) == {"environment": 0.0}
    assert spec.accuracy == "environment"
    assert [make_task("gui", {}, name).reward for name in VARIANTS] == ["environment_reward"] * 8
