"""Prompts to scored groups: seeds, stale samples, prompts that are too long, whose reward scores what."""

from __future__ import annotations

import io
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from tinyworld import image

from vlmrl.errors import DataError, EngineError, RewardError, RewardUnavailable
from vlmrl.rewards.attempts import AttemptRule, OutageError
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.scoring import Scorer, ScoringSession
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.sample import encode_prompt, sample_rollouts, sample_scored, score_rollouts, scored_groups, submit
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import Media, Message, RewardInput, Row, Sample, SamplingParams, Segment, Turn, sample_seed


class Source:
    """A source of one row after the other, without a dataset."""

    def __init__(self, name: str = "digits", text: str = "<image>same?") -> None:
        self.name, self.task_name, self.text = name, "pairs", text
        self.dataset = SimpleNamespace(image=lambda media: image(int(media.sha256), media.width, media.height))

    def row(self, prompt_id: str) -> Row:
        media = tuple(Media(str(i), 56, 56) for i in range(self.text.count("<image>")))
        return Row(prompt_id, self.name, "pairs", {"same": True}, media)

    def encoder(self, encoder: Any, row: Row) -> Any:
        return encoder

    def messages(self, row: Row) -> tuple[Message, ...]:
        return (Message("user", self.text),)

    def reward_input(self, row, text, finish, num_tokens, prompt) -> RewardInput:
        return RewardInput(text, row.truth, row.columns, (), finish, num_tokens, prompt)


class Echo:
    """An engine that answers with its seeds."""

    def __init__(self, version: int = 4) -> None:
        self.version, self.asked = version, []

    def generate(self, requests, params, progress=None):
        self.asked = list(requests)
        return [
            [
                Sample((5, 6), f"{r.seed + k}", (-1.0, -2.0), "stop", self.version, r.seed + k)
                for k in range(r.num_samples)
            ]
            for r in requests
        ]


class Judge(Scorer):
    """A reward of this process that remembers what it was given; it fails if it is told to."""

    def __init__(self, value: float, error: str | None = None) -> None:
        self.seen: list[RewardInput] = []

        def score(x: RewardInput) -> dict[str, float]:
            self.seen.append(x)
            if error is not None:
                raise RewardError(error)
            return {"p": value}

        super().__init__(RewardSpec("judge", score, {}, {}, pure=True))


@pytest.fixture
def prompts(tiny_encoder):
    a, b = Source("a"), Source("b", "yes no")
    return [
        encode_prompt(a, a.row("x"), 0, tiny_encoder, 100),
        encode_prompt(b, b.row("x"), 2, tiny_encoder, 100),
        encode_prompt(a, a.row("y"), 1, tiny_encoder, 100),
    ]


def rollouts_of(prompts, engine=None, version: int = 4):
    return sample_rollouts(engine or Echo(), prompts, SamplingParams(), num_samples=2, run_seed=9, version=version)


def test_a_seed_depends_on_run_step_prompt_and_occurrence_alone(prompts):
    engine = Echo()
    rollouts_of(prompts, engine)
    assert [r.seed for r in engine.asked] == [
        sample_seed(9, 4, "x", 0),
        sample_seed(9, 4, "x", 2),
        sample_seed(9, 4, "y", 1),
    ]
    assert (
        len({sample_seed(*k) for k in [(9, 4, "x", 0), (8, 4, "x", 0), (9, 5, "x", 0), (9, 4, "y", 0), (9, 4, "x", 1)]})
        == 5
    )
    assert all(0 <= r.seed < 2**62 for r in engine.asked)


def test_a_seed_is_the_same_on_every_machine():
    assert sample_seed(0, 0, "p", 0) == 3431265663354217673


def test_samples_of_another_version_are_an_error(prompts):
    with pytest.raises(EngineError, match="version 4, not with 5"):
        rollouts_of(prompts, Echo(4), version=5)


@pytest.mark.parametrize(
    ("author", "versions", "stale"), [("policy", (None, 4), []), ("environment", (3, 4), []), ("policy", (3, 4), [3])]
)
def test_a_segment_of_another_version_is_an_error_unless_the_policy_did_not_write_it(prompts, author, versions, stale):
    class InParts(Echo):
        def generate(self, requests, params, progress=None):
            first, second = versions
            parts = (
                Segment("tool" if author == "environment" else "assistant", (5,), False, author=author, version=first),
                Segment("assistant", (6,), True, (-2.0,), version=second),
            )
            return [[replace(s, segments=parts) for s in samples] for samples in super().generate(requests, params)]

    if stale:
        with pytest.raises(EngineError, match="version 3, not with 4"):
            rollouts_of(prompts, InParts())
    else:
        kept = rollouts_of(prompts, InParts())[0].samples[0]
        assert [s.version for s in kept.parts] == list(versions)


def test_each_source_is_scored_by_its_own_reward_and_groups_keep_their_order(prompts):
    scorers = {"a": Judge(100), "b": Judge(200)}
    groups = score_rollouts(rollouts_of(prompts), scorers, strict=True)
    assert [(g.row.source, g.row.prompt_id) for g in groups] == [("a", "x"), ("b", "x"), ("a", "y")]
    assert [[s.score.parts["p"] for s in g.samples] for g in groups] == [[100, 100], [200, 200], [100, 100]]
    assert [len(scorers[n].seen) for n in "ab"] == [4, 2]
    # each response is what its own reward input said
    assert [x.response for x in scorers["a"].seen] == [s.text for g in (groups[0], groups[2]) for s in g.samples]
    assert scorers["a"].seen[0].prompt == groups[0].prompt_text and scorers["a"].seen[0].num_tokens == 2


def test_a_group_keeps_all_that_is_needed_to_replay_it(prompts):
    groups = score_rollouts(rollouts_of(prompts), {"a": Judge(1), "b": Judge(1)}, strict=True)
    first, second = groups[1].trajectories
    assert (first.task, first.prompt_id, first.occurrence, first.sample, first.version) == ("pairs", "x", 2, 0, 4)
    assert second.seed == first.seed + 1 and second.sample == 1
    assert first.prompt_ids == prompts[1].encoded.prompt_ids
    assert first.response_ids == (5, 6) and first.segments[0].sampler_logp == (-1.0, -2.0) and first.segments[0].trained
    assert groups[0].trajectories[0].media == prompts[0].row.media


def test_a_failed_score_is_masked_and_kept(prompts):
    groups = score_rollouts(rollouts_of(prompts), {"a": Judge(1), "b": Judge(1, "boom")}, strict=False)
    assert [[s.masked for s in g.samples] for g in groups] == [[False, False], [True, True], [False, False]]
    assert groups[1].samples[0].score.error == "boom"


def test_a_strict_failure_says_the_source(prompts):
    with pytest.raises(RewardError, match="boom") as caught:
        score_rollouts(rollouts_of(prompts), {"a": Judge(1), "b": Judge(1, "boom")}, strict=True)
    assert caught.value.where == "row x of b, sample 0"


def test_a_prompt_that_is_too_long_is_an_error_with_the_row_and_its_image_tokens(tiny_encoder):
    source = Source()
    fits = encode_prompt(source, source.row("x"), 0, tiny_encoder, 1000)
    exact = len(fits.encoded.prompt_ids)
    assert encode_prompt(source, source.row("x"), 0, tiny_encoder, exact).encoded.prompt_ids == fits.encoded.prompt_ids
    with pytest.raises(DataError, match="4 of them image tokens") as caught:
        encode_prompt(source, source.row("x"), 0, tiny_encoder, exact - 1)
    assert "row x" in (caught.value.where or "")


class InTurn(Generator):
    """An engine that completes the last prompt first, and each other one when `ready` says so."""

    copies_weights = works_alone = False

    def __init__(self, ready, version: int = 4) -> None:
        self.version, self.ready, self.open, self.rounds = version, ready, [], 0

    @contextmanager
    def round(self, progress=None):
        self.rounds += 1
        yield
        self.open = []

    def submit(self, request, params) -> int:
        self.open.append(request)
        return len(self.open) - 1

    def poll(self, timeout=None):
        left = [i for i, request in enumerate(self.open) if request is not None]
        if len(left) < len(self.open) and not self.ready():
            return []
        request, self.open[left[-1]] = self.open[left[-1]], None
        samples = [
            Sample((5, 6), f"{request.prompt.row.prompt_id} {k}", (-1.0, -2.0), "stop", self.version, request.seed + k)
            for k in range(request.num_samples)
        ]
        return [(left[-1], samples)]


REMEMBERS = """
import pathlib

def reward(x):
    with open(pathlib.Path(__file__).parent / "scored", "a") as file:
        file.write(x.prompt_id + "\\n")
    return float(x.sample)
"""


def test_a_group_is_scored_while_the_others_are_generated_and_groups_keep_their_order(prompts, tmp_path):
    (tmp_path / "mine.py").write_text(REMEMBERS)
    scored, end = tmp_path / "scored", time.monotonic() + 60

    def ready() -> bool:
        """Both responses of the first complete group are scored: nothing else is generated before that."""
        assert time.monotonic() < end
        time.sleep(0.01)
        return scored.exists() and scored.read_text().count("y\n") == 2

    engine = InTurn(ready)
    spec = load_reward("mine.py:reward", base_dir=tmp_path)
    with Scorer(spec) as a, Scorer(spec) as b, ScoringSession({"a": a, "b": b}, strict=True) as session:
        rollouts = sample_scored(engine, prompts, SamplingParams(), session, num_samples=2, run_seed=9, version=4)
        groups = scored_groups(session, rollouts)
    assert [(g.row.source, g.row.prompt_id) for g in groups] == [("a", "x"), ("b", "x"), ("a", "y")]
    assert [[s.text for s in g.samples] for g in groups] == [["x 0", "x 1"], ["x 0", "x 1"], ["y 0", "y 1"]]
    assert [[s.score.value for s in g.samples] for g in groups] == [[0.0, 1.0]] * 3
    assert {s.generate_seconds for g in groups for s in g.samples} == {rollouts[0].seconds} != {0.0}


def test_samples_of_another_version_are_an_error_before_they_are_scored(prompts):
    judge = Judge(1)
    with (
        pytest.raises(EngineError, match="version 3, not with 4"),
        ScoringSession({"b": judge}, strict=True) as session,
    ):
        sample_scored(InTurn(lambda: True, 3), prompts, SamplingParams(), session, num_samples=2, run_seed=9, version=4)
    assert judge.seen == []


def test_a_round_that_fails_cancels_what_is_being_scored(prompts, tmp_path):
    (tmp_path / "mine.py").write_text("import time\ndef reward(x):\n    time.sleep(60)\n")
    with Scorer(load_reward("mine.py:reward", base_dir=tmp_path)) as scorer:
        with pytest.raises(KeyboardInterrupt), ScoringSession({"b": scorer}, strict=True) as session:
            submit(session, 0, rollouts_of(prompts)[1])
            assert scorer.session is session and not session.is_idle
            raise KeyboardInterrupt
        assert scorer.session is None and session.is_idle and scorer.pids() == []


def test_an_error_names_the_row_its_source_and_the_sample(prompts, tmp_path):
    (tmp_path / "mine.py").write_text("def reward(x):\n    return x.missing\n")
    spec = load_reward("mine.py:reward", base_dir=tmp_path)
    with Scorer(spec) as a, Scorer(spec) as b, pytest.raises(RewardError) as error:
        score_rollouts(rollouts_of(prompts), {"a": a, "b": b}, strict=True)
    assert error.value.where in ("row x of a, sample 0", "row x of b, sample 0")


def faulty(prompts, **changes) -> list:
    """The rollouts of prompts; the environment of each first sample failed."""
    return [replace(r, samples=(replace(r.samples[0], **changes), *r.samples[1:])) for r in rollouts_of(prompts)]


@pytest.mark.parametrize("on_outage", ["mask", "wait"])
def test_an_episode_whose_service_is_down_is_left_out_and_is_no_bug(prompts, on_outage) -> None:
    down = faulty(prompts, fault="dict:80 is down", is_outage=True)
    with ScoringSession({"a": Judge(1), "b": Judge(1)}, AttemptRule(on_outage), strict=True) as session:
        for index, rollout in enumerate(down):
            submit(session, index, rollout)
        groups = scored_groups(session, down)
    for group in groups:
        first, *others = group.samples
        assert first.masked and first.score.status == "unavailable" and not first.score.failed
        assert first.score.error == "the environment is unavailable: dict:80 is down"
        assert others and all(x.score.value == 1 for x in others)


def test_it_stops_the_work_where_it_is_to_and_where_nothing_is_left(prompts) -> None:
    down = faulty(prompts, fault="dict:80 is down", is_outage=True)
    alone = [replace(r, samples=r.samples[:1]) for r in down]
    for on_outage, rollouts in (("stop", down), ("wait", alone)):
        with ScoringSession({"a": Judge(1), "b": Judge(1)}, AttemptRule(on_outage), strict=True) as session:
            for index, rollout in enumerate(rollouts):
                submit(session, index, rollout)
            with pytest.raises(OutageError, match="the environment was unavailable for 3 samples: dict:80"):
                scored_groups(session, rollouts)
    with pytest.raises(RewardUnavailable, match="dict:80"):
        score_rollouts(down, {"a": Judge(1), "b": Judge(1)}, strict=True)
    with pytest.raises(RewardError, match="environment failed: no"):
        score_rollouts(faulty(prompts, fault="no"), {"a": Judge(1), "b": Judge(1)}, strict=True)


@pytest.mark.parametrize(("needs", "sizes"), [(True, [(56, 56), (4, 2)]), (False, [])])
def test_a_reward_that_looks_at_images_gets_those_of_tools_behind_the_prompts(prompts, needs, sizes) -> None:
    sink = io.BytesIO()
    Image.new("RGB", (4, 2)).save(sink, "PNG")
    turns = (Turn("assistant", "a"), Turn("tool", "", (Media("f", 4, 2),)), Turn("assistant", "b"))
    rollouts = [
        replace(r, samples=(replace(r.samples[0], turns=turns, files={"f": sink.getvalue()}),))
        for r in rollouts_of(prompts)
    ]
    for r in rollouts:
        own = [image(i, 56, 56) for i in range(len(r.prompt.row.media))] if needs else []
        r.prompt.source.reward_input = lambda row, text, *more, own=own: RewardInput(text, row.truth, {}, own, *more)
    judges = {"a": Judge(1), "b": Judge(1)}
    score_rollouts(rollouts, judges, strict=True)
    assert [[i.size for i in x.images] for x in judges["a"].seen] == [sizes] * 2
