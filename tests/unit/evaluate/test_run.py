"""Evaluating with a scripted engine: what is asked, what is scored, what is kept."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from PIL import Image

from vlmrl.data.encode import EncodedPrompt
from vlmrl.dist.world import World
from vlmrl.errors import DataError, RecipeError, RewardError, RewardUnavailable, VlmrlError
from vlmrl.evaluate import run as evaluating
from vlmrl.evaluate import run as grading
from vlmrl.evaluate.metrics import task_problems
from vlmrl.evaluate.records import read_evaluation, write_evaluation
from vlmrl.evaluate.run import Evaluation, evaluate
from vlmrl.metric import Metric
from vlmrl.rewards.attempts import AttemptRule
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.scoring import Scorer
from vlmrl.rollout.engine import Generator, SamplingRequest
from vlmrl.rollout.sample import answer_pieces, encode_prompt, ranks_of
from vlmrl.store.media import RunImages
from vlmrl.tasks import make_task
from vlmrl.tasks.base import REPLICATES, GradedResponse, Measures, Task
from vlmrl.tasks.figure import Table
from vlmrl.types import Media, Message, RewardInput, RewardResult, Row, Sample, SamplingParams, Score

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=4)


class ScriptedEngine(Generator):
    """Answers each prompt with its own id; remembers what it was asked, piece by piece."""

    version = 3
    copies_weights = works_alone = False

    def __init__(self, finish: str = "stop") -> None:
        self.finish: Any = finish
        self.asked: list[list[SamplingRequest]] = []
        self.params: list[SamplingParams] = []
        self.open: list[tuple[int, SamplingRequest]] = []

    @contextmanager
    def round(self, progress: Callable[[int], Any] | None = None) -> Iterator[None]:
        self.progress = progress or (lambda n: None)
        yield

    def submit(self, request: SamplingRequest, params: SamplingParams) -> int:
        if not self.open:
            self.asked.append([])
            self.params.append(params)
        self.asked[-1].append(request)
        self.open.append((sum(map(len, self.asked)), request))
        return self.open[-1][0]

    def poll(self, timeout: float | None = None) -> list[tuple[int, list[Sample]]]:
        complete = []
        for number, r in self.open:
            texts = [f"{r.prompt.row.prompt_id} {k}" for k in range(r.num_samples)]
            samples = [
                Sample((1, 2, 3), t, (-0.1, -0.2, -0.3), self.finish, 3, r.seed + k) for k, t in enumerate(texts)
            ]
            complete.append((number, samples))
            self.progress(r.num_samples)
        self.open = []
        return complete

    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def load_weights(self, version: int, *, changed: bool = True) -> None: ...


class PlainEncoder:
    def require_fit(self, row: Row, max_prompt_tokens: int) -> None:
        pass

    def encode(self, row: Row, messages: Sequence[Message], images: Sequence[Any]) -> EncodedPrompt:
        return EncodedPrompt(row, messages[0].content, (1, 2), (0, 0), {}, len(images), 0, ())


@dataclass
class ListSource:
    """Rows held in a list, of a task whose answer is right when it names the row."""

    environment = None
    rows: list[Row]
    name: str = "list"
    split: str = "test"
    dataset: Any = None
    seen: list[RewardInput] = field(default_factory=list)
    task: Task = field(
        default_factory=lambda: Task(
            "echo", "", "", lambda truth: [], outcome=lambda x, score: {"accuracy": float(x.truth["id"] in x.response)}
        )
    )

    @property
    def task_name(self) -> str:
        return self.task.name

    def __post_init__(self) -> None:
        self.dataset = self

    def image(self, media: Media) -> str:
        return media.sha256

    def encoder(self, encoder: Any, row: Row) -> Any:
        return encoder

    def messages(self, row: Row) -> tuple[Message, ...]:
        return (Message("user", f"name {row.prompt_id}"),)

    def reward_input(self, row: Row, text: str, finish: Any, num_tokens: int, prompt: str) -> RewardInput:
        self.seen.append(RewardInput(text, row.truth, row.columns, (), finish, num_tokens, prompt))
        return self.seen[-1]


def rows(count: int) -> list[Row]:
    return [Row(f"p{i}", "list", "echo", {"id": f"p{i}"}, (Media(f"m{i}", 8, 8),)) for i in range(count)]


def scorer(fn: Callable[[RewardInput], Any]) -> Scorer:
    return Scorer(RewardSpec("test", fn, {"reward": (0.0, 1.0)}, {"reward": 1.0}, pure=True))


def run(source: Any, engine: Any, fn: Callable[[RewardInput], Any] = lambda x: 0.5, **changes: Any):
    return evaluate(engine, PlainEncoder(), source, scorer(fn), params=GREEDY, **changes)  # type: ignore[arg-type]


def test_every_row_is_answered_scored_and_kept_in_order():
    found = run(ListSource(rows(3)), ScriptedEngine())
    assert [r["prompt_id"] for r in found.rows] == ["p0", "p1", "p2"]
    assert [r["accuracy"] for r in found.rows] == [1.0, 1.0, 1.0]
    assert found.rows[0]["text"] == "p0 0"
    (image,) = found.rows[0]["images"]
    assert image == {**Media("m0", 8, 8).fields(), "seen_width": None, "seen_height": None}
    assert (found.rows[0]["prompt_text"], found.rows[0]["columns"]) == ("name p0", {})
    assert found.summary["metrics"]["reward"]["value"] == 0.5


def test_the_engine_is_asked_with_the_parameters_given():
    engine = ScriptedEngine()
    run(ListSource(rows(2)), engine)
    assert engine.params == [GREEDY]


def test_the_reward_sees_the_prompt_the_length_and_how_it_ended():
    source = ListSource(rows(1))
    run(source, ScriptedEngine("length"))
    assert (source.seen[0].prompt, source.seen[0].num_tokens, source.seen[0].finish) == ("name p0", 3, "length")


def test_max_rows_takes_the_first_rows():
    assert [r["prompt_id"] for r in run(ListSource(rows(5)), ScriptedEngine(), max_rows=2).rows] == ["p0", "p1"]


def drawn(x: RewardInput) -> RewardResult:
    """A reward that draws: each response an image of its own."""
    shade = int(x.truth["id"][1:]) * 40
    picture = Image.new("RGB", (8, 4), (shade, 0, 0))
    return RewardResult({"reward": 0.5}, detail={"shade": shade}, artifacts={"overlay": picture})


def test_what_the_reward_drew_is_kept_with_the_answers(tmp_path: Path):
    found = run(ListSource(rows(3)), ScriptedEngine(), drawn)
    write_evaluation(tmp_path / "eval" / "test", found, {"split": "test"})
    back = read_evaluation(tmp_path / "eval" / "test").rows
    assert [r["detail"] for r in back] == [{"test": {"shade": 40 * i}} for i in range(3)]
    pictures = [Media.of(one) for r in back for one in r["artifacts"] if one["name"] == "overlay"]
    images = RunImages(tmp_path)
    assert [(m.width, m.height) for m in pictures] == [(8, 4)] * 3
    shades = [Image.open(io.BytesIO(images.read(m))).getpixel((0, 0)) for m in pictures]
    assert shades == [(0, 0, 0), (40, 0, 0), (80, 0, 0)]
    assert "artifacts_left_out" not in found.summary


def test_pictures_beyond_the_limit_are_left_out_and_counted(tmp_path: Path):
    size = max(len(file) for file in run(ListSource(rows(1)), ScriptedEngine(), drawn).files.values())
    found = run(ListSource(rows(5)), ScriptedEngine(), drawn, artifact_bytes=3 * size + size // 2)
    kept = [bool(r["artifacts"]) for r in found.rows]
    assert kept == [True, True, True, False, False] and len(found.files) == 3
    assert found.summary["artifacts_left_out"] == 2 and all(r["detail"] for r in found.rows)


def test_a_service_that_is_down_stops_an_evaluation_and_no_training():
    def down(x: RewardInput) -> float:
        raise RewardUnavailable("busy")

    with pytest.raises(RewardUnavailable):
        run(ListSource(rows(2)), ScriptedEngine(), down)
    found = run(ListSource(rows(2)), ScriptedEngine(), down, patient=True)
    assert found.summary["reward_unavailable"] == 2 and "reward" not in found.summary["metrics"]
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        run(ListSource(rows(2)), ScriptedEngine(), lambda x: 1 / 0, patient=True)
    for found in shared(2, down, patient=True):
        assert found.summary["reward_unavailable"] == 7


@pytest.mark.parametrize("size", [1, 2])
def test_an_evaluation_that_waits_for_a_service_is_the_one_without_the_outage(monkeypatch, size):
    monkeypatch.setattr("vlmrl.rewards.attempts.AttemptRule.first_seconds", 0.01)
    monkeypatch.setattr("vlmrl.rewards.scoring.TICK_SECONDS", 0.01)
    calls = Counter()

    def busy(x: RewardInput) -> float:
        calls[x.response] += 1
        if x.response.startswith(("p1", "p3")) and calls[x.response] < 3:
            raise RewardUnavailable("busy")
        return len(x.response) / 9

    expected = run(ListSource(rows(7)), ScriptedEngine(), lambda x: len(x.response) / 9)
    results = shared(size, busy, rule=AttemptRule("wait"))
    assert min(calls["p1 0"], calls["p3 0"]) >= 3 and calls["p0 0"] == 1
    for result in results:
        assert result.rows == expected.rows and result.summary == expected.summary


@pytest.mark.parametrize("rule", [AttemptRule("stop"), AttemptRule("wait", 0.001)])
def test_an_evaluation_that_cannot_be_scored_ends_without_numbers(monkeypatch, rule):
    monkeypatch.setattr("vlmrl.rewards.attempts.AttemptRule.first_seconds", 0.01)
    monkeypatch.setattr("vlmrl.rewards.scoring.TICK_SECONDS", 0.01)

    def down_for_one(x: RewardInput) -> float:
        if x.response.startswith("p1"):
            raise RewardUnavailable("busy")
        return 1.0

    with pytest.raises(RewardUnavailable, match="busy"):
        run(ListSource(rows(3)), ScriptedEngine(), down_for_one, rule=rule)


def test_pictures_that_one_call_could_not_hold_are_counted_too(monkeypatch: pytest.MonkeyPatch):
    size = max(len(file) for file in run(ListSource(rows(1)), ScriptedEngine(), drawn).files.values())
    monkeypatch.setattr("vlmrl.rewards.scoring.MOST_CALL_BYTES", 2 * size)
    monkeypatch.setattr(evaluating, "CHUNK_PROMPTS", 4)
    found = run(ListSource(rows(5)), ScriptedEngine(), drawn)
    kept = [bool(r["artifacts"]) for r in found.rows]
    assert found.summary["artifacts_left_out"] == kept.count(False) and kept[0] and kept[4] and not kept[3]


def test_a_figure_that_fails_is_noted_and_ends_nothing():
    def figures(responses):
        raise RecipeError("`figures` of `echo` raised KeyError", where="task.py:3")

    source = ListSource(rows(2))
    source.task = replace(source.task, figures=figures)
    found = run(source, ScriptedEngine())
    assert found.summary["figures"] == [] and "`figures` of `echo` raised KeyError" in found.summary["figures_problem"]
    source.task = replace(source.task, figures=lambda responses: [Table("t", ["n"], [[len(responses)]])])
    assert run(source, ScriptedEngine()).summary["figures"][0]["rows"] == [[2]]


def test_what_a_task_declares_of_its_metrics_is_in_the_summary():
    source = ListSource(rows(4))
    source.task = replace(
        source.task,
        outcome=lambda x, score: {"accuracy": 1.0, "miss": 1.0, "miss/far": None},
        set_metrics=lambda responses: {"spread": 1.0, "gain": 1.0},
        metrics={"miss": Metric("lower", (0.0, 4.0)), "gain": Metric("higher")},
    )
    metrics = run(source, ScriptedEngine()).summary["metrics"]
    ways = {name: m["better"] for name, m in metrics.items()}
    assert ways == {
        "reward": "higher",
        "accuracy": "higher",
        "miss": "lower",
        "spread": None,
        "gain": "higher",
        "part/reward": "higher",
        "response_tokens": "neither",
        "truncated": "neither",
    }
    assert metrics["miss"]["range"] == [0.0, 4.0]


def test_several_samples_have_seeds_of_their_own():
    found = run(ListSource(rows(2)), ScriptedEngine(), samples=3)
    assert [(r["prompt_id"], r["sample"]) for r in found.rows] == [(f"p{i}", k) for i in range(2) for k in range(3)]
    assert len({r["seed"] for r in found.rows}) == 6


def test_large_splits_are_encoded_in_chunks_and_come_out_whole(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evaluating, "CHUNK_PROMPTS", 2)
    engine, told = ScriptedEngine(), []
    found = run(ListSource(rows(5)), engine, progress=told.append)
    assert [len(batch) for batch in engine.asked] == [2, 2, 1]
    assert [r["prompt_id"] for r in found.rows] == [f"p{i}" for i in range(5)]
    assert sum(told) == 5


class Meeting(World):
    """One of several processes, as a thread: what each gives is exchanged at a barrier."""

    def gather(self, mine: Any) -> list[Any]:
        barrier, places = self.group
        places[self.rank] = mine
        barrier.wait(30)
        found = list(places)
        barrier.wait(30)
        return found


def shared(
    size: int,
    fn: Callable[[RewardInput], Any] = lambda x: len(x.response) / 9,
    source: Callable[[], ListSource] = lambda: ListSource(rows(7)),
    **options: Any,
) -> list[Evaluation]:
    """What each of so many processes gets of one evaluation."""
    meeting = (Barrier(size), [None] * size)

    def work(rank: int) -> Evaluation:
        world = Meeting(rank, size, group=meeting)
        return run(source(), ScriptedEngine(), fn, world=world, ranks=ranks_of(world, lambda text: None), **options)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


@pytest.mark.parametrize("size", [2, 3, 9])
@pytest.mark.parametrize("chunk", [3, 512])
def test_several_processes_make_the_evaluation_of_one(monkeypatch: pytest.MonkeyPatch, size: int, chunk: int):
    monkeypatch.setattr(evaluating, "CHUNK_PROMPTS", chunk)
    alone = run(ListSource(rows(7)), ScriptedEngine(), lambda x: len(x.response) / 9, samples=2, seed=5)
    for found in shared(size, samples=2, seed=5):
        assert found.rows == alone.rows and found.summary == alone.summary


def test_processes_go_on_with_one_value_of_a_metric_that_differs_between_them():
    """Which step is the best, and so who saves, follows from it: every process must see the same number."""
    numbers = iter(range(100))
    task = replace(ListSource([]).task, set_metrics=lambda responses: {"odd": float(next(numbers))})
    found = shared(2, source=lambda: ListSource(rows(1), task=task))
    assert [one.summary["metrics"]["odd"]["value"] for one in found] == [0.0, 0.0]


def test_a_reward_that_fails_on_one_process_alone_is_counted_and_on_all_it_is_an_error():
    broken = lambda x: 1 / 0 if "p1" in x.response else 1.0  # noqa: E731
    assert {e.summary["reward_errors"] for e in shared(3, broken, max_rows=3)} == {1}
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        shared(3, lambda x: 1 / 0)


def test_a_reward_that_fails_on_one_row_leaves_it_without_a_score():
    found = run(ListSource(rows(3)), ScriptedEngine(), lambda x: 1.0 if "p1" not in x.response else 1 / 0)
    assert [r["score"] for r in found.rows] == [1.0, None, 1.0]
    assert "ZeroDivisionError" in found.rows[1]["error"]
    assert found.summary["reward_errors"] == 1


def test_a_reward_that_fails_on_every_row_is_an_error():
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        run(ListSource(rows(3)), ScriptedEngine(), lambda x: 1 / 0)


def test_strict_stops_at_the_first_failure():
    with pytest.raises(RewardError, match="division"):
        run(ListSource(rows(3)), ScriptedEngine(), lambda x: 1.0 if "p0" in x.response else 1 / 0, strict=True)


def test_a_split_without_rows_is_an_error():
    with pytest.raises(DataError, match="no rows"):
        run(ListSource([]), ScriptedEngine())


def test_an_outcome_may_not_take_the_name_of_another_field():
    task = Task("bad", "", "", lambda truth: [], outcome=lambda x, score: {"score": 1.0})
    with pytest.raises(DataError, match="`score`"):
        run(ListSource(rows(1), task=task), ScriptedEngine())


def plain_source(count: int) -> ListSource:
    """Rows of a task that measures nothing itself."""
    return ListSource(rows(count), task=Task("plain", "", "", lambda truth: []))


def scored_by(values: dict[str, float]) -> Callable[[RewardInput], Any]:
    """A reward whose part `acc` is found by the name of the row in the response."""
    return lambda x: {"reward": 0.5, "acc": values[x.response.split()[0]]}


def test_the_accuracy_of_the_reward_is_the_accuracy_where_the_task_has_none():
    found = run(plain_source(2), ScriptedEngine(), scored_by({"p0": 1.0, "p1": 0.0}), samples=2)
    assert [r["accuracy"] for r in found.rows] == [1.0, 1.0, 0.0, 0.0]
    metrics = found.summary["metrics"]
    assert metrics["accuracy"]["value"] == metrics["pass@2"]["value"] == 0.5
    assert 0 <= metrics["accuracy"]["low"] <= metrics["accuracy"]["high"] <= 1
    assert found.summary["accuracy_of"] == "the part `acc` of test"


def test_the_accuracy_of_the_task_stays():
    found = run(ListSource(rows(2)), ScriptedEngine(), scored_by({"p0": 0.0, "p1": 0.0}))
    assert found.summary["metrics"]["accuracy"]["value"] == 1.0 and "accuracy_of" not in found.summary


def test_wrong_answers_of_minus_one_are_right_or_wrong():
    metrics = run(plain_source(2), ScriptedEngine(), scored_by({"p0": 1.0, "p1": -1.0}), samples=2).summary["metrics"]
    assert metrics["accuracy"]["value"] == 0.0 and metrics["pass@1"]["value"] == 0.5
    assert metrics["accuracy"]["low"] < 0, "not a share: the bounds of a share do not hold"


def test_an_accuracy_in_between_is_a_mean_and_has_no_pass_rate():
    found = run(plain_source(2), ScriptedEngine(), scored_by({"p0": 0.25, "p1": 0.5}), samples=2)
    assert found.summary["metrics"]["accuracy"]["value"] == 0.375
    assert not any(name.startswith("pass@") for name in found.summary["metrics"])
    assert "not only right or wrong" in found.summary["accuracy_of"]


def test_metrics_of_the_whole_split_stand_beside_those_of_rows():
    sizes: list[int] = []

    def found(responses: Sequence[GradedResponse]) -> dict[str, float | None]:
        sizes.append(len(responses))
        right = [outcome["accuracy"] == 1.0 for _, _, outcome in responses]
        return {"all_right": float(all(right)), "values": sum(score.value for _, score, _ in responses)}

    task = replace(
        ListSource([]).task, set_metrics=found, unit=lambda row: row.prompt_id in ("p0", "p1") or row.prompt_id
    )
    summary = run(ListSource(rows(11), task=task), ScriptedEngine(), samples=2).summary
    assert (summary["metrics"]["values"]["value"], summary["metrics"]["all_right"]["value"]) == (11.0, 1.0)
    assert (summary["metrics"]["values"]["n"], summary["metrics"]["values"]["clusters"]) == (22, 10)
    assert summary["metrics"]["accuracy"]["value"] == 1.0, "those of rows are there as ever"
    assert sizes[0] == 22 and len(sizes) == 1 + REPLICATES
    assert {20, 22, 24, 26} <= set(sizes[1:]) and max(sizes) <= 40, "one unit of four rows, nine of two; ten drawn"
    assert summary["set_metrics"]["names"] == ["all_right", "values"]


def own_task(folder: Path, fields: str) -> Task:
    """The task of a file whose `Task` has these fields besides its name, summary and template."""
    (folder / "task.py").write_text(
        "import itertools, numpy as np\nfrom vlmrl import Histogram, Lines, Metric, Table, Task\n\n"
        "def boom(*given):\n    raise KeyError('x')\n\n"
        f"def task(info):\n    return Task('any', 'a sum', 'x', **dict({fields}))\n"
    )
    return make_task(f"{folder}/task.py:task", {})


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ("set_metrics=boom", "`set_metrics` of .* raised KeyError"),
        ("set_metrics=lambda v: {'reward': 1.0}", "has a set metric `reward`"),
        ("set_metrics=lambda v: {'ap': 10**400}", "the metric `ap` is 1000"),
        ("set_metrics=lambda v: {'ap': np.array([1, 2])}", "the metric `ap` is array"),
        ("set_metrics=lambda v: 5", "it returned int 5, not a mapping of names to numbers"),
        ("set_metrics=lambda v: {'ap': 1.0}, unit=boom", "`unit` of .* raised KeyError"),
        ("set_metrics=lambda v: {'ap': 1.0}, unit=lambda row: [1]", "list .1., which cannot be a key"),
    ],
)
def test_set_metrics_that_fail_are_noted_and_the_answers_are_kept(tmp_path: Path, fields: str, told: str):
    found = run(ListSource(rows(3), task=own_task(tmp_path, fields)), ScriptedEngine())
    assert len(found.rows) == 3 and found.summary["metrics"]["reward"]["n"] == 3
    assert re.search(told, found.summary["set_metrics_problem"])
    assert re.search(told, *task_problems(found.summary))


def test_set_metrics_may_change_the_list_that_they_get(tmp_path: Path):
    task = own_task(tmp_path, "set_metrics=lambda v: {'ap': float(len(v)) + (v.clear() or 0)}")
    assert run(ListSource(rows(3), task=task), ScriptedEngine()).summary["metrics"]["ap"]["value"] == 3.0


@pytest.mark.parametrize(
    "fields",
    [
        "figures=lambda v: None",
        "figures=lambda v: (1 / 0 for _ in v)",
        "figures=lambda v: (Table('t', ['a'], [[1]]) for _ in itertools.count())",
        "figures=lambda v: [Table('t', ['a'], [[float('nan')]])]",
        "figures=lambda v: [Table('t', ['a'], [[10**5000]])]",
        "figures=lambda v: [Table('t', ['a'], [[np.array([1, 2])]])]",
        "figures=lambda v: [Histogram('t', {'a': [10**400]})]",
        "figures=lambda v: [Histogram('t', {'a': [1]}, bins=2.5)]",
        "figures=lambda v: [Histogram('t', {'a': [1]}, range=(-1e308, 1e308))]",
        "figures=lambda v: [Lines('t', {'a': [(10**400, 1)]})]",
    ],
)
def test_figures_that_cannot_be_drawn_are_noted_and_the_evaluation_is_written(tmp_path: Path, fields: str):
    found = run(ListSource(rows(2), task=own_task(tmp_path, fields)), ScriptedEngine())
    assert found.summary["figures"] == [] and found.summary["figures_problem"]
    write_evaluation(tmp_path / "e", found, {})
    assert len(read_evaluation(tmp_path / "e").rows) == 2


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        ("boom() if 'p1' in x.response else {'accuracy': 1.0}", "raised KeyError"),
        ("{'accuracy': 'yes' if 'p1' in x.response else 1}", "`accuracy` is 'yes'"),
        ("None if 'p1' in x.response else {'accuracy': 1.0}", "it returned None"),
        ("{'reward' if 'p1' in x.response else 'accuracy': 1.0}", "has an outcome `reward`"),
        ("{'a\\nb' if 'p1' in x.response else 'accuracy': 1.0}", "a metric is called 'a.nb'"),
    ],
)
def test_an_answer_that_the_task_cannot_measure_costs_its_numbers_alone(tmp_path: Path, outcome: str, told: str):
    source = ListSource(rows(3), task=own_task(tmp_path, f"outcome=lambda x, score: {outcome}"))
    found = run(source, ScriptedEngine())
    assert [row["outcome"] for row in found.rows] == [{"accuracy": 1.0}, {}, {"accuracy": 1.0}]
    assert found.summary["metrics"]["accuracy"]["n"] == 2 and found.summary["metrics"]["reward"]["n"] == 3
    assert found.summary["outcome_problems"]["rows"] == 1
    assert re.search(told, found.summary["outcome_problems"]["first"])
    write_evaluation(tmp_path / "e", found, {})
    assert len(read_evaluation(tmp_path / "e").rows) == 3


@pytest.mark.parametrize("outcome", ["boom()", "5", "{'truncated': 1.0}", "{'pass@2': 1.0}", "{'score': 1.0}"])
def test_a_task_that_can_measure_no_answer_stops_before_any_is_made(tmp_path: Path, outcome: str):
    engine = ScriptedEngine()
    with pytest.raises(VlmrlError):
        run(ListSource(rows(3), task=own_task(tmp_path, f"outcome=lambda x, score: {outcome}")), engine)
    assert not engine.asked


def test_numbers_of_numpy_count_like_floats(tmp_path: Path):
    task = own_task(tmp_path, "outcome=lambda x, score: {'accuracy': np.float32(0.5), 'hit': np.bool_(True)}")
    found = run(ListSource(rows(2), task=task), ScriptedEngine())
    assert found.summary["metrics"]["accuracy"]["value"] == 0.5 and found.summary["metrics"]["hit"]["value"] == 1.0


def test_an_outcome_reads_what_the_reward_has_found():
    def detailed(x: RewardInput) -> RewardResult:
        return RewardResult(0.5, detail={"said": x.response.split()[0]})

    def outcome(x: RewardInput, score: Score) -> dict[str, float | None]:
        said = (score.detail or {}).get("test", {}).get("said")
        return {"accuracy": float(said == x.truth["id"]), "prompt_tokens": float(len(x.prompt))}

    task = replace(ListSource([]).task, outcome=outcome)
    found = run(ListSource(rows(2), task=task), ScriptedEngine(), detailed, samples=4)
    assert [r["accuracy"] for r in found.rows] == [1.0] * 8
    assert found.rows[0]["outcome"]["prompt_tokens"] == len("name p0")
    assert found.summary["metrics"]["pass@4"]["value"] == 1.0


def test_rows_that_a_service_did_not_judge_are_no_bugs():
    def down(x: RewardInput) -> float:
        if x.truth["id"] == "p1":
            raise RewardUnavailable("no answer from judge:8000")
        return 1.0

    for options in ({}, {"rule": AttemptRule("mask")}):
        found = run(ListSource(rows(3)), ScriptedEngine(), down, **options)
        assert [r["status"] for r in found.rows] == ["ok", "unavailable", "ok"]
        assert (found.summary["reward_errors"], found.summary["reward_unavailable"]) == (0, 1)
        reward = found.summary["metrics"]["reward"]
        assert (reward["value"], reward["n"]) == (1.0, 2), "never a 0"
    with pytest.raises(RewardError, match="unavailable: no answer from judge:8000"):
        run(ListSource(rows(3)[1:2]), ScriptedEngine(), down)


def test_measures_are_taken_of_each_chunk_and_kept_with_the_records(monkeypatch):
    monkeypatch.setattr(grading, "CHUNK_PROMPTS", 2)
    monkeypatch.setattr(evaluating, "CHUNK_PROMPTS", 2)

    class Measurer:
        absent, problems = {"far": "no weights"}, []
        seen: list[list[str]] = []

        def measure(self, inputs: Sequence[RewardInput]) -> list[dict[str, float | None]]:
            self.seen.append([x.response for x in inputs])
            return [{"near": 0.25, "near/valid": None if x.response == "p2 0" else 0.25} for x in inputs]

        def close(self) -> None: ...

    known = Measures(("near", "far"), ("near",), {}, lambda settings: Measurer())
    source = ListSource(rows(3), task=Task("echo", "", "", metrics={"near": Metric("higher", (0, 1))}, measures=known))

    def respond(chunks: Any) -> Any:
        pieces = ([(n, encode_prompt(source, row, 0, PlainEncoder(), 99)) for n, row in c] for c in chunks)  # type: ignore[arg-type]
        return answer_pieces(ScriptedEngine(), pieces, GREEDY, num_samples=1, run_seed=0)

    measurer = Measurer()
    found = evaluating.evaluate_responses(respond, source, scorer(lambda x: 0.5), params=GREEDY, measurer=measurer)  # type: ignore[arg-type]
    assert measurer.seen == [["p0 0", "p1 0"], ["p2 0"]]
    assert [(r["near"], r["near/valid"]) for r in found.rows] == [(0.25, 0.25), (0.25, 0.25), (0.25, None)]
    metrics = found.summary["metrics"]
    assert [(metrics[n]["n"], metrics[n]["better"], metrics[n]["range"]) for n in ("near", "near/valid")] == [
        (3, "higher", [0.0, 1.0]),
        (2, "higher", [0.0, 1.0]),
    ]
    assert found.summary["measures"] == {"names": ["near"], "absent": {"far": "no weights"}, "unasked": []}
