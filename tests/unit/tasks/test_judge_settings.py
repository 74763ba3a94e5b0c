"""The table `[judge]`: identity of the reward, keys that may change, a judge of one reward, and shared services."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from endpoint_server import Reply
from judge_server import Asked, judgement_text, refuse, serve_judge
from PIL import Image

from vlmrl.errors import ProblemsError
from vlmrl.recipe.changes import rule_of
from vlmrl.recipe.explain import explain
from vlmrl.recipe.load import load_recipe
from vlmrl.recipe.tables import Judge
from vlmrl.reward_check.probe import probe_reward
from vlmrl.rewards import reward_record
from vlmrl.rewards.attempts import AttemptRule, OutageError
from vlmrl.rewards.base import Member, ServicePlace
from vlmrl.rewards.identity import identity_of
from vlmrl.rewards.scoring import Scorer, ScoringSession
from vlmrl.rewards.service_pool import ServiceMeter
from vlmrl.rewards.several import compose
from vlmrl.services.rubric import read_rubric
from vlmrl.tasks.builtin_rewards import load_recorded, load_reward
from vlmrl.tasks.source import reward_of
from vlmrl.tasks.vfig.task import figures_task
from vlmrl.types import RewardInput

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

RUBRIC = """
instructions = "Compare."
[[axes]]
name = "truth"
weight = 1.0
describe = "The text is true."
"""
TABLE = {"provider": "vllm", "model": "judge-1", "attempts": 1, "timeout_seconds": 5.0}


def write_recipe(folder: Path, judge: str, rewards: str = '[reward]\nname = "vfig"\n') -> Path:
    path = folder / "one.toml"
    path.write_text(f'[model]\npath = "m"\n[[data]]\npath = "d"\ntask = "figures"\n{rewards}[judge]\n{judge}\n')
    return path


def inputs(*responses: str) -> list[RewardInput]:
    return [RewardInput(response, {}, images=(Image.new("RGB", (20, 20)),)) for response in responses]


def text_judge(**more: Any) -> Any:
    return load_reward("judge", args={"judge": {**TABLE, **more}, "render": "none"})


def test_every_key_is_explained_and_its_rule_on_resume_follows_from_what_a_score_depends_on() -> None:
    of_score = {"provider", "model", "rubric", "outage", "max_tokens", "temperature"}
    for name in Judge.model_fields:
        if name != "prices":
            assert explain(f"judge.{name}").help
            assert rule_of(("judge", name)).kind == ("asked" if name in of_score else "free"), name
    assert rule_of(("judge", "prices", "input")).kind == "free"
    assert explain("judge.concurrency").range == ">= 1 and <= 1,024"


def test_a_wrong_key_is_told_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ProblemsError) as caught:
        load_recipe(write_recipe(tmp_path, 'model = "m"\nconcurency = 3\nmax_cost = -1.0'))
    unknown, low = sorted(caught.value.problems, key=lambda p: "max_cost" in p.message)
    assert "judge.concurency" in unknown.message and str(unknown.where).endswith("one.toml:10")
    assert "did you mean `concurrency`?" in (unknown.hint or "") and str(low.where).endswith("one.toml:11")


def test_one_reward_may_have_a_judge_of_its_own(tmp_path: Path) -> None:
    own = '[[rewards]]\nname = "vfig"\n[[rewards]]\nname = "vfig"\nlabel = "second"\nweight = 0.0\n'
    own += 'args = { judge = { provider = "openai", model = "gpt" } }\n'
    table = 'model = "gem"\nkey_env = "MINE"\nconcurrency = 4\nprices = { input = 1.0, output = 2.0 }'
    loaded = load_recipe(write_recipe(tmp_path, table, own)).recipe
    spec, _ = reward_of(loaded.data[0], loaded.reward, figures_task({"name": "figures", "task": "figures"}))
    first, second = (single.service.args["judge"] for single in spec.singles if single.service)
    assert first == {"model": "gem", "key_env": "MINE", "concurrency": 4, "prices": {"input": 1.0, "output": 2.0}}
    # Another provider: its key and prices are not those of the table. The concurrency is.
    assert second == {"provider": "openai", "model": "gpt", "concurrency": 4}


def test_a_record_is_the_same_reward_whatever_the_address_and_the_speed() -> None:
    slow = text_judge(concurrency=1, endpoint="http://one/v1", max_calls=5)
    fast, other = text_judge(concurrency=64, endpoint="http://two/v1"), text_judge(model="judge-2")
    records = [reward_record(spec, {}) for spec in (slow, fast, other)]
    assert identity_of(records[0]) == identity_of(records[1]) != identity_of(records[2])
    again = load_recorded(records[0])
    assert again.service and slow.service and again.service.args == slow.service.args


def test_a_rubric_of_ones_own_belongs_to_the_reward_and_its_file_is_needed_once(tmp_path: Path) -> None:
    file = tmp_path / "rubric.toml"
    file.write_text(RUBRIC)
    args = {"judge": TABLE, "rubric": str(file), "render": "none"}
    record = reward_record(load_reward("judge", args=args), {})
    assert str(tmp_path) not in str(record)
    file.write_text(RUBRIC.replace("is true", "is short"))
    assert identity_of(reward_record(load_reward("judge", args=args), {})) != identity_of(record)
    file.unlink()
    again = load_recorded(record)
    assert identity_of(reward_record(again, {})) == identity_of(record) and dict(again.weights) == {"truth": 1.0}


def test_the_rubric_of_the_page_is_one() -> None:
    page = (Path(__file__).parents[3] / "docs" / "rewards" / "judge.md").read_text(encoding="utf-8")
    text = next(block for block in page.split("```")[1::2] if "[[axes]]" in block).removeprefix("text\n")
    rubric = read_rubric(tomllib.loads(text), "docs/rewards/judge.md")
    assert rubric.weights == {"parts": 0.6, "wires": 0.4} and len(rubric.examples) == 1


def test_rewards_with_equal_settings_share_a_judge_and_are_counted_once(tmp_path: Path) -> None:
    with serve_judge(lambda number, asked: judgement_text(0.5)) as endpoint:
        spec = text_judge(endpoint=endpoint.address, prices={"input": 1.0, "output": 1.0})
        place, meter = ServicePlace(str(tmp_path)), ServiceMeter()
        with Scorer(spec, place=place) as one, Scorer(compose([Member("a", spec, {})]), place=place) as two:
            one.score(inputs("x", "y"))
            two.score(inputs("x", "z"))
            services = [*one.services, *two.services]
            first = meter.read(services)
            assert len(services) == 2 and services[0] is services[1]
            assert first["judge/calls"] == 3 and first["judge/cached"] == 1
            # 900 + 40 tokens a call, 1.0 per million each.
            assert first["judge/cost"] == pytest.approx(3 * 940e-6)
            one.score(inputs("w"))
            assert meter.read(services)["judge/calls"] == 1 and meter.total["judge/calls"] == 4
            assert "4 calls, 1 judgement from the cache, cost 0.0038" in services[0].summary(meter.total)
    assert (tmp_path / "judge.sqlite").is_file()


def test_a_call_without_an_answer_is_named_beside_the_cost_that_is_assumed_for_it(tmp_path: Path) -> None:
    release = threading.Event()

    def script(number: int, asked: Asked) -> str:
        if number == 0:
            release.wait(20)
        return judgement_text(0.5)

    with serve_judge(script) as endpoint:
        prices = {"input": 1.0, "output": 1.0}
        spec = text_judge(endpoint=endpoint.address, prices=prices, timeout_seconds=1.5, max_tokens=1000, attempts=9)
        meter = ServiceMeter()
        with Scorer(spec, place=ServicePlace(str(tmp_path))) as scorer:
            scorer.score(inputs("x"))
            counts = meter.read(scorer.services)
            line = scorer.services[0].summary(meter.total)
            release.set()
    assert (counts["judge/calls"], counts["judge/assumed"], counts["judge/input_tokens"]) == (2, 1, 900)
    # The answered call has 900 + 40 tokens. The other may have 1,000 tokens of answer, and those of its prompt.
    assert counts["judge/assumed_cost"] > 1000e-6
    assert counts["judge/cost"] == pytest.approx(940e-6 + counts["judge/assumed_cost"])
    assert f"1 call without an answer or a number of tokens: {counts['judge/assumed_cost']:.4f} of the cost" in line


def test_the_probe_says_how_often_it_asked_a_judge(tmp_path: Path) -> None:
    with serve_judge(lambda number, asked: judgement_text(0.5)) as endpoint:
        spec = text_judge(endpoint=endpoint.address, prices={"input": 1.0, "output": 1.0})
        limits = {"place": ServicePlace(str(tmp_path))}
        report = probe_reward(spec, spec.weights, inputs("x"), limits=limits)
        calls = len(endpoint.requests)
    assert calls > 10 and f"judge: {calls} calls, " in report["services"]
    assert f"cost {calls * 940e-6:.4f}" in report["services"]


@pytest.mark.parametrize("action", ["wait", "mask", "stop"])
def test_a_spent_budget_ends_the_work_at_once_whatever_the_rule_for_outages(tmp_path: Path, action: Any) -> None:
    with serve_judge(lambda number, asked: judgement_text(0.5)) as endpoint:
        spec = text_judge(endpoint=endpoint.address, max_calls=2)
        with (
            Scorer(spec, place=ServicePlace(str(tmp_path))) as scorer,
            pytest.raises(OutageError, match="2 of 2 calls") as caught,
            ScoringSession({"s": scorer}, AttemptRule(action, 10.0), strict=True) as session,
        ):
            session.submit(0, "s", inputs("a", "b", "c"))
            session.collect()
        assert "judge.max_calls" in (caught.value.hint or "") and len(endpoint.requests) == 2


def test_a_judge_of_another_folder_answers_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    down = False

    def script(number: int, asked: Asked) -> str | Reply:
        return refuse(asked.protocol, 503) if down else judgement_text(0.75)

    with serve_judge(script) as endpoint:
        spec = text_judge(endpoint=endpoint.address)
        with Scorer(spec, place=ServicePlace(str(tmp_path))) as scorer:  # as an evaluation of an endpoint does
            scorer.score(inputs("x"))
    monkeypatch.setenv("VLMRL_JUDGE_OFFLINE", "1")
    run = tmp_path / "run"
    run.mkdir()
    with Scorer(spec, place=ServicePlace(str(run))) as scorer:
        known, unknown = scorer.score(inputs("x", "never asked"))
    assert known.value == 0.75 and unknown.status == "unavailable" and list(run.iterdir()) == []
