"""Responses of a local engine are kept piece by piece: a killed evaluation generates no whole piece again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vlmrl.data.encode import EncodedPrompt
from vlmrl.dist.world import World
from vlmrl.evaluate import responses
from vlmrl.evaluate.responses import EngineResponder, journal_identity, work_identity
from vlmrl.recipe.schema import Recipe
from vlmrl.rollout.engine import Generator, SamplingRequest
from vlmrl.rollout.sample import Prompt, Rollout
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.store.response_journal import ResponseJournal
from vlmrl.types import Row, Sample, SamplingParams

ROWS = [Row(f"r{i}", "s", "t", {"answer": i}) for i in range(10)]
META: dict[str, Any] = {"model": "m", "dtype": "float32", "sampling": {"temperature": 1.0, "samples": 2}}


class DyingEngine(Generator):
    """Answers with the prompt's id and the seed, and dies at its call number `dies_at`. A call is all that waits."""

    version = 5
    copies_weights = works_alone = False

    def __init__(self, dies_at: int | None = None, admits: bool = False) -> None:
        self.calls: list[list[str]] = []
        self.dies_at, self.admits = dies_at, admits
        self.open: list[tuple[int, SamplingRequest]] = []
        self.count = 0

    @contextmanager
    def round(self, progress: Callable[[int], Any] | None = None) -> Iterator[None]:
        yield

    def submit(self, request: SamplingRequest, params: SamplingParams) -> int:
        self.open.append((self.count, request))
        self.count += 1
        return self.count - 1

    def poll(self, timeout: float | None = None) -> list[tuple[int, list[Sample]]]:
        if len(self.calls) == self.dies_at:
            raise KeyboardInterrupt
        self.calls.append([r.prompt.row.prompt_id for _, r in self.open])
        complete, self.open = self.open, []
        return [
            (
                number,
                [
                    Sample((1, k, 9), f"{r.prompt.row.prompt_id}:{r.seed + k}", (-1.0,) * 3, "length", 5, r.seed + k)
                    for k in range(r.num_samples)
                ],
            )
            for number, r in complete
        ]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(source: Any, row: Row, *more: Any) -> Prompt:
        return Prompt(source, row, 0, EncodedPrompt(row, row.prompt_id, (7,), (0,), {}, 0, 0, ()))

    monkeypatch.setattr(responses, "encode_prompt", encode)
    monkeypatch.setattr(responses, "PIECE_PROMPTS", 4)


def respond(root: Path, engine: DyingEngine, told: list[int] | None = None) -> list[Rollout]:
    with ResponseJournal(root, "s", META, rows=len(ROWS), samples=2) as journal:
        count = (told if told is not None else []).append
        responder = EngineResponder(
            engine=engine,
            encoder=None,  # pyright: ignore
            journal=journal,
            source=SimpleNamespace(name="s"),  # pyright: ignore
            params=SamplingParams(),
            seed=3,
            samples=2,
            progress=count,
        )
        answers = [answer for answer in responder(iter([list(enumerate(ROWS))])) if answer is not None]
        return [rollout for _, rollout in sorted(answers, key=lambda answer: answer[0])]


def facts(rollouts: Sequence[Rollout]) -> list[Any]:
    return [
        (r.prompt.row.prompt_id, s.text, s.token_ids, s.finish, s.version, s.seed, s.num_sampled_tokens)
        for r in rollouts
        for s in r.samples
    ]


@pytest.mark.parametrize("dies_at", [0, 1, 2])
def test_whole_pieces_are_not_generated_again_and_the_result_is_the_same(tmp_path: Path, dies_at: int) -> None:
    whole = facts(respond(tmp_path / "whole", DyingEngine()))
    assert len(whole) == 20 and whole[0][:2] != whole[1][:2]
    with pytest.raises(KeyboardInterrupt):
        respond(tmp_path, DyingEngine(dies_at))
    engine, told = DyingEngine(), []
    assert facts(respond(tmp_path, engine, told)) == whole
    pieces = [["r0", "r1", "r2", "r3"], ["r4", "r5", "r6", "r7"], ["r8", "r9"]]
    assert engine.calls == pieces[dies_at:] and sum(told) == 8 * dies_at


@pytest.mark.parametrize("admits", [False, True])
def test_a_half_written_piece_is_generated_whole_or_its_missing_rows_by_an_engine_that_admits_requests(
    tmp_path: Path, admits: bool
) -> None:
    whole = facts(respond(tmp_path, DyingEngine()))
    (path,) = (tmp_path / "unfinished").iterdir()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: 1 + 8 + 3]))  # the first piece (rows 0 to 3), row 4, and one response of row 5
    engine = DyingEngine(admits=admits)
    assert facts(respond(tmp_path, engine)) == whole
    # With requests, the pieces are submitted together.
    assert engine.calls == ([["r5", "r6", "r7", "r8", "r9"]] if admits else [["r4", "r5", "r6", "r7"], ["r8", "r9"]])


def test_other_weights_settings_and_ranks_are_other_work(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    recipe = Recipe.model_validate({"model": {"path": "m"}, "data": [{"path": "d"}]})
    origin = ModelOrigin(str(tmp_path))

    def identity(meta: dict[str, Any] = META, recipe: Recipe = recipe, samples: int = 2, world: World = World()) -> Any:
        return work_identity(meta, recipe, origin, samples, world)

    def changed(table: str, **values: Any) -> Recipe:
        return recipe.model_copy(update={table: getattr(recipe, table).model_copy(update=values)})

    first = identity()
    assert identity() == first
    others = [
        identity({**META, "seed": 1}),
        identity({**META, "sampling": {"temperature": 0.5}}),
        identity(recipe=changed("model", max_pixels=3136)),
        identity(recipe=changed("rollout", top_p=0.5)),
        identity(samples=3),
    ]
    (tmp_path / "config.json").write_text("{ }")
    assert all(other != first for other in [*others, identity()])
    assert journal_identity({**META, "reward": "another"}) == journal_identity(META)
