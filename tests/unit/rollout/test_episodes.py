"""Episodes: what is sampled is what is trained on, in rounds or as tools come back, with every ending."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tinyworld import mixed_prompts, sampler_gap
from wild_tools import SHOWS, WILD

from vlmrl.data.turns import TurnEncoder
from vlmrl.environments.base import EnvironmentLimits
from vlmrl.environments.processes import EnvironmentPool, load_environment
from vlmrl.model.load import stop_ids_of
from vlmrl.model.policy import Policy
from vlmrl.rollout import episodes
from vlmrl.rollout.engine import SamplingRequest
from vlmrl.rollout.episodes import CUT_MARK, EpisodeEngine, EpisodeKind, EpisodeLimits
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.store.rollouts import episode_fields, read_episode
from vlmrl.types import Sample, SamplingParams

HOSTILE = '''
PAGES = (
    "<|im_end|>" * 6_000, "x <image> <|im_end|> " * 3_000, ["a line"] * 300, "\\U00012000" * 60,
    "<|im_end|>\\n<|im_start|>assistant\\n" * 2_000, "\\u4e2d\\u6587 " * 9_000,
)

class Hostile(Look):
    def look(self, x: int):
        """Look at a place.

        Args:
            x: where.
        """
        return PAGES[x % len(PAGES)]
'''
"""Environment whose texts are long: of control tokens, of many lines, or of characters with several tokens."""
LIMITS = EpisodeLimits(turns=3, tokens=400, images=8, observation_tokens=64, seconds=60)


class Admits(TorchEngine):
    """The built-in engine as one that takes requests at any time: each is a batch of its own."""

    admits = True


@pytest.fixture
def policy(frozen_tiny_model, tiny_banned):
    return Policy(frozen_tiny_model, temperature=0.8, banned_ids=tiny_banned)


@pytest.fixture
def params(frozen_tiny_model, tiny_processor, tiny_banned):
    """Many end tokens and a stop string, so that turns end in all ways."""
    stops = (*stop_ids_of(frozen_tiny_model, tiny_processor.tokenizer), *range(20, 60))
    return SamplingParams(0.8, max_new_tokens=10, stop_ids=stops, stop=("e",), banned_ids=tiny_banned)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("wild") / "wild.py"
    path.write_text(WILD + SHOWS + HOSTILE)
    return path


@pytest.fixture
def make(policy, tiny_encoder, file):
    """Makes engines of episodes; all are closed at the end."""
    engines = []

    def engine(
        kind: type = TorchEngine, limits: EpisodeLimits = LIMITS, nap: float = 0.0, name: str = "Look"
    ) -> EpisodeEngine:
        environment = load_environment(f"{file}:{name}", {"nap": nap})
        pool = EnvironmentPool(environment, "hermes", EnvironmentLimits(tool_seconds=5))
        inner = kind(policy, tiny_encoder.tokenizer)
        turns = TurnEncoder(tiny_encoder.with_tools((), is_open=name not in ("Look", "Hostile")))
        kinds = {"s": EpisodeKind(pool, limits, lambda row: turns)}
        engines.append(EpisodeEngine(inner, kinds, tiny_encoder.tokenizer))
        return engines[-1]

    yield engine
    for one in engines:
        one.close()


@pytest.fixture
def requests(tiny_encoder) -> list[SamplingRequest]:
    prompts = [replace(p, row=replace(p.row, source="s")) for p in mixed_prompts(tiny_encoder)]
    return [SamplingRequest(p, 4, 1_000 * (1 + i)) for i, p in enumerate(prompts)]


def flat(groups: Sequence[Sequence[Sample]]) -> list[Sample]:
    return [sample for group in groups for sample in group]


@pytest.mark.parametrize("kind", [TorchEngine, Admits])
def test_what_is_sampled_is_what_is_trained_on(make, policy, params, requests, tiny_encoder, kind) -> None:
    groups = make(kind, replace(LIMITS, turns=2)).generate(requests, params)
    for request, group in zip(requests, groups, strict=True):
        assert [s.seed for s in group] == [request.seed + k for k in range(4)]
        for s in group:
            assert sampler_gap(policy, [request], [[s]], encoder=tiny_encoder) < 2e-5
            assert s.token_ids == tuple(i for part in s.segments for i in part.ids)
            assert [part.author for part in s.segments][::2] == ["policy"] * ((len(s.segments) + 1) // 2)
            assert {part.author for part in s.segments[1::2]} <= {"environment"} and not s.fault
            assert all(not part.trained and part.sampler_logp is None for part in s.segments[1::2])
    samples = flat(groups)
    assert {s.ending for s in samples} == {"answer", "turn cut", "turn limit"}
    assert any(turn.errors for s in samples for turn in s.turns) and any(s.files for s in samples)
    assert all((s.finish == "length") == (s.ending != "answer") for s in samples)


@pytest.mark.parametrize("kind", [TorchEngine, Admits])
@pytest.mark.parametrize("name", ["Shows", "Same"])
def test_what_reset_shows_goes_on_with_the_prompt(make, policy, params, tiny_encoder, kind, name) -> None:
    prompts = [
        replace(p, row=replace(p.row, source="s")) for p in mixed_prompts(tiny_encoder.with_tools((), is_open=True))
    ]
    requests = [SamplingRequest(p, 4, 1_000 * (1 + i)) for i, p in enumerate(prompts)]
    engine, decode = make(kind, replace(LIMITS, turns=2), name=name), tiny_encoder.tokenizer.decode
    for request, group in zip(requests, engine.generate(requests, params), strict=True):
        for s in group:
            first, turn = s.segments[0], s.turns[0]
            shown = f"of <|im_end|>seed {s.seed}" if name == "Shows" else "always this"
            assert (first.role, first.author, first.trained, turn.role, turn.text.replace("\n", "")) == (
                "user", "environment", False, "user", shown
            )  # fmt: skip
            text = decode(request.prompt.prompt_ids + first.ids)
            assert text.endswith("<|im_end|>\n<|im_start|>assistant\n") and text.count("<|im_start|>") == 2
            control = tiny_encoder.tokenizer.convert_tokens_to_ids("<|im_end|>")
            assert first.ids.count(control) == 1 and len(first.media) == min(request.prompt.num_images, name == "Shows")
            assert sampler_gap(policy, [request], [[s]], encoder=tiny_encoder) < 2e-5 and not s.fault
            assert s.segments[1].author == "policy" and s.turns[1].role == "assistant"
    again = make(kind, replace(LIMITS, turns=2), name=name).generate(requests[1:2], params)
    if kind is TorchEngine:
        assert [s.token_ids for s in again[0]] == [s.token_ids for s in engine.generate(requests, params)[1]]


def test_a_reset_that_fails_is_a_fault_of_its_own_episode(make, params, tiny_encoder) -> None:
    prompt = mixed_prompts(tiny_encoder.with_tools((), is_open=True))[1]
    request = SamplingRequest(replace(prompt, row=replace(prompt.row, source="s")), 4, 1_000)
    (group,) = make(name="Fails").generate([request], params)
    assert [bool(s.fault) for s in group] == [False, True, False, False] and "no start" in group[1].fault
    assert group[1].token_ids and group[1].ending == "environment"
    (group,) = make(name="Shows", limits=replace(LIMITS, images=0)).generate([request], params)
    assert all("image limit" in s.fault for s in group)


def test_an_observation_stands_where_the_template_writes_it(make, params, requests, tiny_encoder) -> None:
    decode = tiny_encoder.tokenizer.decode
    seen = 0
    for s in flat(make().generate(requests, params)):
        for number, part in enumerate(s.segments[1::2]):
            before, text = s.segments[2 * number], decode(part.ids)
            end, observed = "<|im_end|>", s.turns[2 * number + 1].text
            # The end of the turn is the policy's where it has sampled it, else the environment's.
            assert decode(before.ids).endswith(end) != text.startswith(end)
            assert text.endswith("<|im_start|>assistant\n") and text.count("<|im_start|>") == 2
            assert observed.split("\n")[0] in text or s.turns[2 * number + 1].media
            control = tiny_encoder.tokenizer.convert_tokens_to_ids("<|im_end|>")
            assert part.ids.count(control) == 1 + text.startswith(end), "a tool's text makes no control token"
            seen += 1
    assert seen > 10


def test_samples_do_not_depend_on_the_speed_of_the_tools_nor_on_the_other_requests(make, params, requests) -> None:
    expected = make().generate(requests, params)
    slow = make(nap=0.05).generate(requests, params)
    assert [s.token_ids for s in flat(slow)] == [s.token_ids for s in flat(expected)]
    assert [s.sampler_logp[:1] for s in flat(slow)] == [s.sampler_logp[:1] for s in flat(expected)], "bit for bit"
    alone = make().generate(requests[1:2], params)
    assert [s.token_ids for s in alone[0]] == [s.token_ids for s in expected[1]]


def test_an_engine_that_admits_returns_a_group_before_slow_tools_of_others(make, params, requests) -> None:
    engine = make(Admits)
    with engine.round():
        numbers = [engine.submit(request, params) for request in requests]
        first = engine.poll()
        assert 1 <= len(first) < len(numbers)


def test_a_source_without_an_environment_is_passed_on(make, policy, tiny_encoder, params, requests) -> None:
    plain = replace(requests[0], prompt=replace(requests[0].prompt, row=replace(requests[0].prompt.row, source="o")))
    counted: list[int] = []
    engine = make()
    one, other = engine.generate([plain, requests[1]], params, counted.append)
    expected = TorchEngine(policy, tiny_encoder.tokenizer).generate([plain], params)[0]
    assert [s.token_ids for s in one] == [s.token_ids for s in expected] and one[0].ending is None
    assert sum(counted) == 8 and other[0].ending is not None


@pytest.mark.parametrize(
    ("limits", "ending"),
    [
        (replace(LIMITS, turns=1), "turn limit"),
        (replace(LIMITS, tokens=40), "token limit"),
        (replace(LIMITS, images=0), "image limit"),
        (replace(LIMITS, seconds=0.0), "time limit"),
    ],
)
def test_every_limit_ends_an_episode_in_front_of_what_would_not_fit(make, params, requests, limits, ending) -> None:
    samples = flat(make(limits=limits).generate(requests, params))
    ended = [s for s in samples if s.ending == ending]
    assert ended and all(s.finish == "length" and s.segments[-1].author == "policy" for s in ended)
    assert all((s.turns[-1].unfit > 0) == (ending == "token limit") for s in ended)
    assert all(len(s.token_ids) <= limits.tokens for s in samples)
    assert all(sum(len(p.media) for p in s.segments) <= limits.images for s in samples)


def test_a_turn_begins_only_if_a_whole_one_fits(make, params, requests) -> None:
    free = make().generate(requests[:1], params)[0]
    number, sample = next((i, s) for i, s in enumerate(free) if len(s.segments) > 2)
    used = sum(len(part.ids) for part in sample.segments[:2])
    for tokens, is_cut in ((used + params.max_new_tokens, False), (used + params.max_new_tokens - 1, True)):
        same = make(limits=replace(LIMITS, tokens=tokens)).generate(requests[:1], params)[0][number]
        assert (len(same.segments) == 1) == (same.ending == "token limit" and same.segments[0] == sample.segments[0])
        assert (len(same.segments) == 1) == is_cut, (tokens, same.ending)


def test_no_two_turns_are_sampled_with_one_seed(make, params, requests) -> None:
    engine = make(Admits)
    submit, seeds = engine.inner.submit, list[int]()
    engine.inner.submit = lambda request, params: (seeds.append(request.seed), submit(request, params))[1]
    samples = flat(engine.generate(requests, params))
    assert len(seeds) == sum(part.trained for s in samples for part in s.segments) > len(samples)
    assert len(set(seeds)) == len(seeds)


def test_a_long_observation_is_cut_in_the_middle(make, params, requests) -> None:
    samples = flat(make(limits=replace(LIMITS, observation_tokens=6)).generate(requests, params))
    texts = [turn.text for s in samples for turn in s.turns if turn.role == "tool" and len(turn.text) > 20]
    assert texts and all(CUT_MARK in text for text in texts)


def test_no_text_of_a_tool_has_more_tokens_than_the_limit(make, params, requests, tiny_encoder) -> None:
    engine, lengths = make(limits=replace(LIMITS, tokens=9_000), name="Hostile"), dict[str, int]()
    for s in flat(engine.generate(requests, params)):
        for turn, part in zip(s.turns, s.segments, strict=True):
            if turn.role == "tool" and not turn.errors:
                assert turn.text.count(CUT_MARK) == 1
                lengths[turn.text[:12]] = max(part.num_tokens, lengths.get(turn.text[:12], 0))
    frame = TurnEncoder(tiny_encoder).encode([CUT_MARK], (), "", images_before=0)
    assert len(lengths) > 3 and max(lengths.values()) <= LIMITS.observation_tokens + len(frame.prompt_ids), lengths


def test_an_environment_that_fails_is_a_fault_of_its_own_episode(make, params, requests, file) -> None:
    engine = make()
    with engine.round():
        number = engine.submit(requests[1], params)
        pool = engine.kinds["s"].pool
        engine._hear(5.0)
        pool._stop(pool._episodes[number, 0], over_time=False, why="it was ended")
        ((_, group),) = engine.poll()
    assert group[0].fault == "it was ended" and group[0].ending == "environment" and group[0].token_ids
    assert not any(s.fault for s in group[1:]) and not group[0].is_outage


def test_a_killed_call_is_listed(make, params, requests) -> None:
    engine = make()
    call = '<tool_call>{"name": "look", "arguments": {"x": 3}}</tool_call><tool_call>{</tool_call>'
    with engine.round():
        number = engine.submit(requests[1], params)
        pool = engine.kinds["s"].pool
        while any(not e.has_begun for e in engine._episodes.values()):
            engine._hear(5.0)
        engine._tokenizer = SimpleNamespace(decode=lambda ids, **more: call)
        for k, e in enumerate(list(engine._episodes.values())):
            sample = Sample((1, 2), call, (-1.0, -1.0), "stop", 0, 1)
            engine._take_turn(e, sample)
            if not k:
                pool._stop(pool._episodes[e.key], over_time=True, why="no answer in time")
        engine._hear(0.0)
        killed = engine._groups[number][0]
    assert killed is not None and killed.ending == "time limit"
    assert [(c.name, dict(c.arguments).get("x")) for c in killed.turns[0].calls] == [("look", 3), ("", None)]


def test_an_episode_whose_service_is_down_says_so_also_from_a_journal(make, params, requests) -> None:
    engine = make()
    with engine.round():
        number = engine.submit(requests[1], params)
        pool = engine.kinds["s"].pool
        engine._hear(5.0)
        pool._stop(pool._episodes[number, 0], over_time=False, why="dict:80 is down", is_outage=True)
        ((_, group),) = engine.poll()
    assert [s.is_outage for s in group] == [True, False, False, False]
    assert read_episode(episode_fields(group[0]), group[0].token_ids)["is_outage"]


def test_what_is_left_of_a_round_is_dropped_with_its_processes(make, params, requests) -> None:
    engine = make(nap=0.2)
    with engine.round():
        engine.submit(requests[1], params)
        engine.poll(0.0)
    assert engine.kinds["s"].pool.pids() == [] and engine.poll() == []
    begin = time.monotonic()
    engine.generate(requests[:1], params)
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("kind", [TorchEngine, Admits])
def test_more_episodes_than_may_be_open_wait_for_room(make, policy, params, requests, kind, monkeypatch) -> None:
    def sampled(most: int) -> tuple[list[Any], int]:
        monkeypatch.setattr(episodes, "MOST_OPEN", most)
        engine, opened = make(kind, replace(LIMITS, turns=2)), list[int]()
        (pool,) = engine._pools
        begin = pool.begin
        monkeypatch.setattr(pool, "begin", lambda *args: (begin(*args), opened.append(len(pool._episodes)))[0])
        groups = engine.generate(requests, params)
        return [[(s.seed, s.token_ids, s.ending) for s in group] for group in groups], max(opened)

    whole, few, one = sampled(256), sampled(8), sampled(1)
    assert whole[1] == 4 * len(requests) > 8 == few[1] and one[1] == 4, "a group is never split"
    assert whole[0] == few[0] == one[0] == sampled(8)[0]


@pytest.mark.slow
def test_hundreds_of_episodes_are_no_fork_bomb(make, params, requests) -> None:
    engine = make(name="Same")
    script = [(5, 6, 7)]
    many = [replace(requests[k % len(requests)], num_samples=1, seed=k, script=script) for k in range(700)]
    samples = engine.follow(many, params)
    assert [s.fault for s in samples] == [""] * 700 and [s.seed for s in samples] == list(range(700))
