"""Plan of evaluations with changed images, and who sees which images of a prompt with several."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlmrl.data.blinded_images import ImageChange, ShownMedia, parse_changes
from vlmrl.data.encode import EncodedPrompt
from vlmrl.errors import StoreError
from vlmrl.evaluate.eval import EvalSettings, PlannedEvaluation, plan
from vlmrl.evaluate.eval_plan import ShownRows
from vlmrl.evaluate.eval_rows import EvalRows, SeenRows, rows_to_evaluate
from vlmrl.evaluate.records import Evaluation, write_evaluation
from vlmrl.evaluate.responses import journal_identity
from vlmrl.evaluate.run import NumberedRow, Responses
from vlmrl.recipe.load import load_recipe
from vlmrl.recipe.schema import Recipe
from vlmrl.rollout.sample import Prompt, Rollout, score_rollouts
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.setup.sources import make_scorer
from vlmrl.store import layout
from vlmrl.types import Sample

REWARD = """
def score(x):
    colours = [image.getpixel((0, 0))[0] for image in x.images]
    assert colours == x.truth["answer"], colours
    assert [m.sha256 for m in x.media] == x.columns["own"], x.media
    return {"reward": 1.0, "accuracy": 1.0}

score.needs_images = True
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A table of five rows of two images each, of two sizes."""
    from vlmrl.data.images import image_hash

    rows = []
    for i in range(5):
        for k in range(2):
            Image.new("RGB", (28, 28 + 28 * k), (20 * i + k, 1, 2)).save(tmp_path / f"{i}{k}.png")
        files = [tmp_path / f"{i}{k}.png" for k in range(2)]
        own = [image_hash(f.read_bytes()) for f in files]
        row = {"prompt": "<image> or <image>", "images": [f.name for f in files], "own": own}
        rows.append({**row, "answer": [20 * i, 20 * i + 1]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "r.toml").write_text(
        '[model]\npath = "m"\n[[data]]\npath = "rows.jsonl"\n[reward]\nname = "reward.py:score"\n'
    )
    monkeypatch.chdir(tmp_path)
    return load_recipe("r.toml").recipe


def planned(recipe: Recipe, run_dir: Path | None, images: str | None, **settings: Any) -> list[PlannedEvaluation]:
    rows = rows_to_evaluate(recipe, SeenRows())
    return plan(recipe, ModelOrigin("m"), rows, run_dir, EvalSettings(changes=parse_changes(images), **settings))


def write(run_dir: Path, name: str, meta: Any) -> Path:
    folder = layout.eval_dir(run_dir, name)
    folder.parents[1].mkdir(parents=True, exist_ok=True)
    write_evaluation(folder, Evaluation([], {"metrics": {}}), meta)
    return folder


def names(evaluations: Sequence[PlannedEvaluation]) -> list[tuple[str, str | None, Any]]:
    return [(one.name, one.meta.get("images"), one.meta.get("normal")) for one in evaluations]


def test_the_normal_evaluation_is_made_unless_the_run_has_it(recipe: Recipe, tmp_path: Path) -> None:
    run = tmp_path / "run"
    normal = ("train-rows", None, None)
    blank, low = ("train-rows-blank", "blank", "train-rows"), ("train-rows-low-7", "low:7", "train-rows")
    assert names(planned(recipe, run, "blank,low:7")) == [normal, blank, low]
    (made,) = planned(recipe, run, None)
    folder = write(run, "train-rows", made.meta)
    assert names(planned(recipe, run, "blank,low:7")) == [blank, low]
    # One of another name is the same thing; one of other sampling, of training or of other settings is not.
    folder.rename(folder.with_name("mine"))
    assert names(planned(recipe, run, "blank")) == [("train-rows-blank", "blank", "mine")]
    assert len(planned(recipe, run, "blank", temperature=1.0)) == 2
    for change in ({"during": "training"}, {"images": "noise"}, {"dtype": "other"}, {"generation_sha256": "other"}):
        write(run, "mine", {**made.meta, **change})
        assert len(planned(recipe, run, "blank")) == 2, change


def test_the_names_say_it_and_are_not_taken_twice(recipe: Recipe, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert [one.name for one in planned(recipe, run, "noise", name="x")] == ["x", "x-noise"]
    (_, noise) = planned(recipe, run, "noise")
    write(run, noise.name, {**noise.meta, "seed": 9})
    with pytest.raises(StoreError, match="made with another seed: 9"):
        planned(recipe, run, "noise")
    assert len(planned(recipe, run, "noise", force=True)) == 2


def test_a_named_normal_evaluation_must_be_of_the_same_thing(recipe: Recipe, tmp_path: Path) -> None:
    (made,) = planned(recipe, None, None)
    folder = write(tmp_path / "other", "any", {**made.meta, "dtype": None})  # as an endpoint's
    assert names(planned(recipe, None, "blank", normal=folder)) == [("train-rows-blank", "blank", str(folder))]
    write(tmp_path / "other", "any", {**made.meta, "model": "another"})
    with pytest.raises(StoreError, match="made with another model"):
        planned(recipe, None, "blank", normal=folder)


def test_responses_to_changed_images_are_kept_apart(recipe: Recipe) -> None:
    normal, *changed = planned(recipe, None, "blank,shuffled,low:4,low:5")
    identities = [json.dumps(journal_identity(one.meta)) for one in (normal, *changed)]
    assert len(set(identities)) == 5 and "images" not in journal_identity(normal.meta)
    # Images are shuffled among the evaluated rows: other rows, other images.
    fewer = {**changed[1].meta, "max_rows": 3}
    assert journal_identity(fewer) != journal_identity(changed[1].meta)
    assert journal_identity({**normal.meta, "max_rows": 3}) == journal_identity(normal.meta)


@pytest.mark.parametrize("text", ["blank", "noise", "shuffled", "low:4"])
def test_the_model_sees_changed_images_and_everything_else_the_true_row(recipe: Recipe, text: str) -> None:
    (rows,) = rows_to_evaluate(recipe, SeenRows())
    source = rows.source
    shown = ShownRows(source, ImageChange.parse(text), 0, rows.count)
    seen: list[tuple[Any, ...]] = []

    def respond(chunks: Iterator[Sequence[NumberedRow]]) -> Responses:
        for number, row in chain.from_iterable(chunks):
            assert [m.content for m in shown.source.messages(row)] == ["<image> or <image>"]
            seen.append(tuple(shown.source.dataset.image(m).getpixel((0, 0)) for m in row.media))
            sizes = tuple((m.width, m.height) for m in row.media)
            encoded = EncodedPrompt(row, "text", (1,), (0,), {}, 2, 0, sizes)
            sample = Sample((1,), "a", (), "stop", 0, 0)
            yield number, Rollout(Prompt(shown.source, row, 0, encoded), (sample,), 0.0)

    numbers = [1, 2, 4]
    true_rows = [source.rows[i] for i in numbers]
    chunks = iter([[(1, true_rows[0]), (2, true_rows[1])], [(4, true_rows[2])]])
    responses = [response for response in shown.answered(respond)(chunks) if response is not None]
    assert [number for number, _ in responses] == numbers
    rollouts = [rollout for _, rollout in responses]
    assert [r.prompt.row for r in rollouts] == true_rows and all(r.prompt.source is source for r in rollouts)
    own = [tuple((20 * i + k, 1, 2) for k in range(2)) for i in numbers]
    if text == "low:4":  # one colour stays one colour
        assert seen == own
    else:
        assert not any({*new} & {*old} for new, old in zip(seen, own, strict=True))
    if text == "shuffled":  # both images of one other row, in order
        assert all(a[0] // 20 == b[0] // 20 and b[0] % 20 == 1 for a, b in seen)
    with make_scorer(source, recipe) as scorer:
        groups = score_rollouts(rollouts, {source.name: scorer}, strict=True)
    for group, row in zip(groups, true_rows, strict=True):
        trajectory = group.samples[0].trajectory
        assert group.row == row and trajectory.media != row.media
        assert [(m.width, m.height) for m in trajectory.media] == [(28, 28), (28, 56)]
        assert all(isinstance(m, ShownMedia) for m in trajectory.media) == (text != "shuffled")


def test_without_a_change_nothing_is_wrapped(recipe: Recipe) -> None:
    (rows,) = rows_to_evaluate(recipe, SeenRows())
    assert isinstance(rows, EvalRows)
    shown = ShownRows(rows.source, None, 0, 5)
    respond: Any = object()
    assert shown.source is rows.source and shown.answered(respond) is respond
