"""Rewards of a judge: drawn responses, shared calls, outages, judgements from the cache, and the recipe's table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from endpoint_server import Endpoint, Reply
from judge_server import AXES, Asked, honest, judgement_text, refuse, serve_judge
from PIL import Image

from vlmrl.errors import RecipeError, RewardError
from vlmrl.recipe.load import load_recipe
from vlmrl.rewards import load_recorded as load_general
from vlmrl.rewards import reward_record
from vlmrl.rewards.attempts import AttemptRule
from vlmrl.rewards.base import Member
from vlmrl.rewards.scoring import Scorer, ScoringSession
from vlmrl.rewards.several import compose
from vlmrl.tasks.builtin_rewards import load_recorded, load_reward
from vlmrl.tasks.judged.rewards import judge, vfig
from vlmrl.tasks.judged.service import OFFLINE
from vlmrl.tasks.source import reward_of
from vlmrl.tasks.vfig.task import figures_task
from vlmrl.types import RewardInput

HEAD = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 20">'


def box(side: int) -> str:
    return f'{HEAD}<rect width="{side}" height="{side}" fill="red"/></svg>'


def table(endpoint: Endpoint | str, **more: Any) -> dict[str, Any]:
    address = endpoint if isinstance(endpoint, str) else endpoint.address
    fast = {"attempts": 1, "timeout_seconds": 5.0}
    return {"provider": "vllm", "model": "judge-1", "endpoint": address, "cache": False, **fast, **more}


def inputs(*responses: str) -> list[RewardInput]:
    truth = {"svg": box(10), "source": "a"}
    return [RewardInput(response, truth, images=(Image.new("RGB", (20, 20), "white"),)) for response in responses]


def test_the_axes_are_the_parts_and_what_cannot_be_drawn_is_not_asked():
    asked: list[Asked] = []

    def script(number: int, one: Asked) -> str:
        asked.append(one)
        return judgement_text(0.25, presence=1.0)

    with serve_judge(script) as endpoint, Scorer(vfig(judge=table(endpoint))) as scorer:
        fine, cut, none = scorer.score(inputs(box(5), box(5)[:-6], "no code"))
    assert fine.parts == {"render": 1.0, "presence": 1.0, "layout": 0.25, "connectivity": 0.25, "details": 0.25}
    assert fine.value == pytest.approx(0.4375) and "render" in fine.artifacts
    assert cut.value == none.value == 0 and cut.note.startswith("not drawn: ")
    assert len(asked) == 1 and len(asked[0].pictures) == 2


def test_a_picture_larger_than_what_may_be_drawn_does_not_score_0():
    large = RewardInput(response=box(5), images=[Image.new("RGB", (17_000, 1000), "white")])
    with serve_judge(lambda number, one: judgement_text(0.5)) as endpoint:
        scorer = Scorer(vfig(judge=table(endpoint)))
        with scorer:
            (score,) = scorer.score([large])
    assert score.value == 0.5 and score.parts["render"] == 1


def test_equal_pictures_of_a_group_share_a_call_and_groups_come_as_they_are_ready(tmp_path: Path):
    more = {"concurrency": 4, "cache": str(tmp_path / "judge.sqlite")}
    with serve_judge(honest) as endpoint, Scorer(vfig(judge=table(endpoint, **more))) as scorer:
        with ScoringSession({"": scorer}, strict=False) as session:
            for key in range(4):
                session.submit(key, "", inputs(box(5), box(5).replace("red", "#f00"), box(6 + key)))
            groups = session.collect()
        calls = len(endpoint.requests)
    assert [group.key for group in groups] == [0, 1, 2, 3] and calls == 5
    assert all(group.scores[0].value == group.scores[1].value for group in groups)


def test_an_outage_is_no_score_and_the_call_waits_for_its_end():
    down = True

    def script(number: int, one: Asked) -> str | Reply:
        return refuse(one.protocol, 503) if down else judgement_text(0.5)

    with serve_judge(script) as endpoint:
        with Scorer(vfig(judge=table(endpoint))) as scorer:
            with ScoringSession({"": scorer}, AttemptRule("mask"), strict=False) as session:
                session.submit(0, "", inputs(box(5)))
                ((score,),) = [group.scores for group in session.collect()]
            assert score.status == "unavailable" and score.error and scorer.failures == 0
        with Scorer(vfig(judge=table(endpoint, outage="wait"))) as scorer:
            with ScoringSession({"": scorer}, AttemptRule("wait"), strict=False) as session:
                session.submit(0, "", inputs(box(5), box(6)))
                while session.waiting is None or session.waiting.number < 2:
                    session.listen(0.01)
                assert session.scored == {}
                down = False
                (group,) = session.collect()
            assert [score.value for score in group.scores] == [0.5, 0.5]
        with Scorer(vfig(judge=table("http://127.0.0.1:9/v1", outage="zero"))) as scorer:
            (score,) = scorer.score(inputs(box(5)))
            assert score.value == 0 and "down" in score.note


@pytest.mark.parametrize("answer", ["NaN", "9.0", "-1"])
def test_an_invalid_judgement_is_no_score_and_nobody_waits(answer: str):
    with (
        serve_judge(lambda number, one: judgement_text(answer)) as endpoint,
        Scorer(vfig(judge=table(endpoint))) as scorer,
        ScoringSession({"": scorer}, AttemptRule("wait"), strict=False) as session,
    ):
        session.submit(0, "", inputs(box(5)))
        ((score,),) = [group.scores for group in session.collect()]
    assert score.status == "unavailable" and session.waited_seconds == 0.0


def test_judgements_come_from_the_cache_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = {"cache": str(tmp_path / "judge.sqlite")}
    with serve_judge(honest) as endpoint:
        values = table(endpoint, **settings)
        with Scorer(vfig(judge=values)) as scorer:
            first = scorer.score(inputs(box(5), box(6)))
        calls = len(endpoint.requests)
        monkeypatch.setenv(OFFLINE, "1")
        with Scorer(vfig(judge=values)) as scorer:
            again = scorer.score(inputs(box(5), box(6), box(7)))
        assert len(endpoint.requests) == calls == 2
    assert [score.value for score in again[:2]] == [score.value for score in first]
    assert again[2].status == "unavailable"


def test_a_judge_beside_another_reward():
    with serve_judge(lambda number, one: judgement_text(0.5)) as endpoint:
        members = [
            Member("code", load_reward("svg", args={"key": "svg"}), {}),
            Member("look", vfig(judge=table(endpoint)), {}),
        ]
        with Scorer(compose(members)) as scorer:
            right, wrong = scorer.score(inputs(box(10), "no code"))
    assert right.value == pytest.approx(1.5) and wrong.value == 0
    assert right.parts["look.presence"] == 0.5


def half_to(asked: list[Asked]) -> Callable[[int, Asked], str]:
    """A judge that gives 0.5 to everything, and keeps what it was asked."""

    def script(number: int, one: Asked) -> str:
        asked.append(one)
        return judgement_text(0.5)

    return script


def test_text_is_judged_beside_the_expected_answer():
    asked: list[Asked] = []
    with serve_judge(half_to(asked)) as endpoint:
        spec = judge(judge=table(endpoint), render="none", key="source")
        with Scorer(spec) as scorer:
            (score,) = scorer.score(inputs("a red box"))
    assert "a red box" in asked[0].text and score.value == 0.5 and set(score.parts) == set(AXES)


def test_a_row_without_an_image_is_judged_by_its_text_alone():
    asked: list[Asked] = []
    with serve_judge(half_to(asked)) as endpoint:
        with Scorer(judge(judge=table(endpoint), render="none", key="source")) as scorer:
            shown, bare = scorer.score([(one := inputs("a red box")[0]), replace(one, images=())], strict=True)
        with Scorer(judge(judge=table(endpoint))) as scorer, pytest.raises(RewardError, match="has no image"):
            scorer.score([replace(one, response=box(5), images=())], strict=True)
    assert (shown.value, bare.value) == (0.5, 0.5)
    with_pictures, alone = sorted(asked, key=lambda one: -len(one.pictures))
    assert [len(one.pictures) for one in (with_pictures, alone)] == [2, 0]
    assert "a red box" in alone.text and "EXPECTED ANSWER" in alone.text
    assert "There are no pictures" in alone.text and "There are no pictures" not in with_pictures.text


def test_a_record_loads_the_same_reward_and_holds_no_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", "secret-4711")
    spec = load_reward("vfig", args={"judge": table("http://127.0.0.1:9/v1", provider="openai", key_env="JUDGE_KEY")})
    record = reward_record(spec, {})
    assert "secret-4711" not in str(record)
    assert load_recorded(record).args == spec.args
    with pytest.raises(RewardError, match="vfig"):
        load_general(record)


def test_mistakes_in_the_settings():
    with pytest.raises(RewardError, match=r"no table `\[judge\]`"):
        vfig()
    with pytest.raises(RecipeError, match="unknown key `modle`"):
        vfig(judge={"provider": "vllm", "modle": "x", "model": "y"})
    with pytest.raises(RewardError, match="render"):
        judge(judge=table("http://127.0.0.1:9/v1"), render="png")


def test_the_table_of_a_recipe_reaches_the_rewards(tmp_path: Path):
    recipe = tmp_path / "one.toml"
    recipe.write_text(
        '[model]\npath = "m"\n[[data]]\npath = "d"\ntask = "figures"\n[judge]\nprovider = "vllm"\nmodel = "j"\n'
        '[[rewards]]\nname = "task"\nweight = 0.5\n[[rewards]]\nname = "vfig"\n'
    )
    loaded = load_recipe(recipe).recipe
    task = figures_task({"name": "figures", "task": "figures"})
    spec, weights = reward_of(loaded.data[0], loaded.reward, task)
    assert weights == {"svg": 0.5, "vfig": 1.0} or list(weights.values()) == [0.5, 1.0]
    judged = next(member.spec for member in spec.members if member.spec.name == "vfig")
    scored_by = {"provider": "vllm", "model": "j", "outage": "mask", "max_tokens": 4096, "temperature": 0.0}
    assert judged.args == {"judge": scored_by} and judged.free_args == {}
