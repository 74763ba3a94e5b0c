"""The queue of prompts over the ranks: each prompt once, one's own first, and nothing waits for a slow rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.data.encode import EncodedPrompt
from vlmrl.dist.world import ALONE, World
from vlmrl.rollout.engine import Generator, SamplingRequest
from vlmrl.rollout.sample import Prompt, PromptQueue, join_groups, sample_scored
from vlmrl.train.collect import Collected
from vlmrl.types import Group, Media, RewardInput, Row, Sample, SamplingParams, Score, ScoredSample, Segment, Trajectory


class Threads(World):
    """A rank that is a thread of this process."""

    def gather(self, mine: Any) -> list[Any]:
        values, barrier = self.group
        values[self.rank] = mine
        barrier.wait(20)
        all_values = list(values)
        barrier.wait(20)  # nobody writes the next value before all have read
        return all_values

    def gather_to_main(self, mine: Any) -> list[Any]:
        values = self.gather(mine)
        return values if self.is_main else []

    def hand_out(self, of_ranks: Any) -> Any:
        return self.gather(of_ranks)[0][self.rank]


def ranks(size: int) -> list[World]:
    store, together = dist.HashStore(), ([None] * size, Barrier(size))
    return [Threads(rank, size, rank, size, together, store) for rank in range(size)]


@given(st.integers(1, 4), st.integers(0, 20), st.integers(1, 8), st.lists(st.integers(0, 3), max_size=60))
def test_every_prompt_is_taken_once_in_any_order_of_the_ranks(
    size: int, count: int, first: int, order: list[int]
) -> None:
    queues = [PromptQueue(count, world, "x", first) for world in ranks(size)]
    takers = [iter(queue) for queue in queues]
    for rank in [*(r for r in order if r < size), *range(size)]:
        next(takers[rank], None)
    for taker in takers:
        list(taker)
    assert sorted(i for queue in queues for i in queue.taken) == list(range(count))
    for rank, queue in enumerate(queues):
        own = [i % size == rank for i in queue.taken]
        assert own == sorted(own, reverse=True), "one of another rank before one's own"
        assert queue.taken[:first] == list(range(rank, count, size))[:first] or not all(own[:first])
        assert {*list(range(rank, count, size))[:first]} <= {*queue.taken}, "a rank has lost one of its first"


def test_the_others_take_what_waits_for_a_slow_rank() -> None:
    slow, *others = (PromptQueue(18, world, "x", 2) for world in ranks(3))
    at_once = iter(slow)
    assert [next(at_once), next(at_once)] == [0, 3]
    for queue in others:
        list(queue)
    assert list(at_once) == [], "nothing is left when it has room again"
    assert [len(queue.taken) for queue in (slow, *others)] == [2, 14, 2]


def test_a_fixed_deal_needs_no_store() -> None:
    world = World(1, 3, 1, 3)
    assert list(PromptQueue(8, world)) == [1, 4, 7] and list(PromptQueue(6, world, "x", 2)) == [1, 4]
    assert list(PromptQueue(3, ALONE)) == [0, 1, 2]


class Engine(Generator):
    """Completes its oldest request at every poll, once `may_go` says so."""

    version, copies_weights, works_alone = 4, False, False

    def __init__(self, may_go: Callable[[], bool] = lambda: True) -> None:
        self.may_go, self.open, self.most = may_go, list[tuple[int, SamplingRequest]](), 0
        self.number = 0

    @contextmanager
    def round(self, progress: Callable[[int], Any] | None = None) -> Iterator[None]:
        yield

    def submit(self, request: SamplingRequest, params: SamplingParams) -> int:
        self.number += 1
        self.open.append((self.number, request))
        self.most = max(self.most, len(self.open))
        return self.number

    def poll(self, timeout: float | None = None) -> list[tuple[int, list[Sample]]]:
        if not self.may_go():
            return []
        number, r = self.open.pop(0)
        samples = [Sample((1,), "a", (-1.0,), "stop", 4, r.seed + k) for k in range(r.num_samples)]
        return [(number, samples)]


class Rows:
    name = task_name = "rows"
    dataset: Any = None

    def reward_input(self, row: Row, text: str, *facts: Any) -> RewardInput:
        return RewardInput(text)


UNSCORED: Any = SimpleNamespace(submit=lambda *group: None, listen=lambda: None)
"""Stands for a session that scores nothing."""


def prompt(index: int) -> Prompt:
    row = Row(f"row-{index}", "rows", "rows", {})
    return Prompt(Rows(), row, 0, EncodedPrompt(row, "?", (1,), (0,), {}, 0, 0, ()))  # type: ignore[arg-type]


def sample_on(worlds: list[World], engines: list[Engine], count: int, room: int | None) -> tuple[list[Any], list[Any]]:
    """(rollouts of all prompts as the first rank gets them, the queues)."""
    queues = [PromptQueue(count, world, "x", room) for world in worlds]
    joined: list[Any] = [None] * len(worlds)

    def work(rank: int) -> None:
        queue = queues[rank]
        options: dict[str, Any] = {"num_samples": 2, "run_seed": 9, "version": 4, "room": room}
        rollouts = sample_scored(engines[rank], map(prompt, queue), SamplingParams(), UNSCORED, **options)
        joined[rank] = queue.join([replace(rollout, seconds=0.0) for rollout in rollouts])

    run_threads(work, len(worlds))
    assert all(rollouts == joined[0] for rollouts in joined)
    return joined[0], queues


@given(st.integers(1, 4), st.integers(0, 9), st.lists(st.integers(0, 3), max_size=20))
@settings(deadline=None, max_examples=30)
def test_images_go_to_the_first_rank_and_stay_where_they_were_sampled(size: int, count: int, order: list[int]) -> None:
    queues = [PromptQueue(count, world, "x", 1) for world in ranks(size)]
    takers = [iter(queue) for queue in queues]
    for rank in [*(r for r in order if r < size), *range(size)]:
        next(takers[rank], None)
    for taker in takers:
        list(taker)
    whole = [pictured(index) for index in range(count)]
    joined: list[Any] = [None] * size

    def work(rank: int) -> None:
        joined[rank] = join_groups(queues[rank], [whole[i] for i in queues[rank].taken])

    run_threads(work, size)
    for rank, groups in enumerate(joined):
        assert groups == whole, "files are not compared"
        for index, (group, expected) in enumerate(zip(groups, whole, strict=True)):
            tools, drawn = ([s.files for s in expected.samples], [s.score.files for s in expected.samples])
            if rank != 0:
                tools, drawn = (tools if index in queues[rank].taken else [{}, {}]), [{}, {}]
            assert [s.files for s in group.samples] == tools
            assert [s.score.files for s in group.samples] == drawn


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=9))
@settings(deadline=None, max_examples=30)
def test_a_rank_gets_the_images_of_the_groups_that_it_trains(size: int, moves: list[tuple[int, int]]) -> None:
    """Group i is sampled by rank `moves[i][0]` and trained by rank `moves[i][1]`, modulo the number of ranks."""
    sampled, trained = [a % size for a, _ in moves], [b % size for _, b in moves]
    queues = [PromptQueue(len(moves), world, "x", 0) for world in ranks(size)]
    for queue in queues:
        queue.taken = [i for i, rank in enumerate(sampled) if rank == queue.world.rank]
    whole = [pictured(index) for index in range(len(moves))]
    collected: list[Any] = [None] * size
    sent: list[Any] = [None] * size

    def work(rank: int) -> None:
        groups = join_groups(queues[rank], [whole[i] for i in queues[rank].taken])
        one = collected[rank] = Collected(refuse, seen_files, refuse, groups=groups)
        own = [i for i, by in enumerate(trained) if by == rank]
        one.fetch_images(queues[rank].world, own)
        sent[rank] = dict(one.files)
        one.fetch_images(queues[rank].world, own)  # a second batch of the step, of the same groups
        assert one.files == sent[rank]

    run_threads(work, size)
    for rank, one in enumerate(collected):
        missing = [i for i, by in enumerate(trained) if by == rank != 0 and sampled[i] != rank]
        assert sent[rank] == {f"tool-{i}-{k}": b"t" for i in missing for k in range(2)}, "no image of another group"
        for index in (i for i, by in enumerate(trained) if by == rank):
            for k, sample in enumerate(one.groups[index].samples):
                assert one.tail_of(sample)[1][f"tool-{index}-{k}"] == b"t"


def refuse(*given: Any) -> Any:
    raise AssertionError(given)


def seen_files(sample: ScoredSample, files: Mapping[str, bytes]) -> Any:
    return (), files


def pictured(index: int) -> Group:
    """A group of two samples with an image of a tool, and one of the reward, each."""
    samples = []
    for k in range(2):
        policy = Segment("assistant", (5, k), True, (-1.0, -1.0))
        image = Media(f"tool-{index}-{k}", 8, 8)
        trajectory = Trajectory(
            "rows",
            f"row-{index}",
            0,
            k,
            0,
            7,
            (1,),
            (policy, Segment("tool", (6,), False, author="environment", media=(image,))),
            (),
            "stop",
        )
        score = Score(float(k), {}, files={f"reward-{index}-{k}": b"r"})
        samples.append(ScoredSample(trajectory, "x", score, files={f"tool-{index}-{k}": b"t"}))
    return Group(Row(f"row-{index}", "rows", "rows", {}), "?", tuple(samples))


def run_threads(work: Any, size: int) -> None:
    threads = [Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


def test_engines_take_groups_from_a_slow_rank_and_the_samples_stay_the_same() -> None:
    alone, _ = sample_on([ALONE], [Engine()], 14, None)
    worlds = ranks(3)
    done = {1: Engine(), 2: Engine()}
    # Rank 0's engine completes nothing until the others have nothing left to do.
    slow = Engine(lambda: sum(engine.number - len(engine.open) for engine in done.values()) == 12)
    rollouts, queues = sample_on(worlds, [slow, done[1], done[2]], 14, 2)
    assert queues[0].taken == [0, 3] and len(queues[1].taken) + len(queues[2].taken) == 12
    assert [engine.most for engine in (slow, *done.values())] == [2, 2, 2]
    assert [r.samples for r in rollouts] == [r.samples for r in alone]
    assert [r.prompt.row.prompt_id for r in rollouts] == [f"row-{i}" for i in range(14)]
    assert worlds[0].store.num_keys() == 0, "counters are left"


@pytest.mark.parametrize("count", [0, 1, 5])
def test_few_prompts_stay_with_their_ranks(count: int) -> None:
    _, queues = sample_on(ranks(3), [Engine() for _ in range(3)], count, 2)
    assert [queue.taken for queue in queues] == [list(range(rank, count, 3)) for rank in range(3)]
