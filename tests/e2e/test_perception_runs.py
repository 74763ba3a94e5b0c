"""Runs that look at the picture: what is measured and kept, resume, masks that hide nothing, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import own_process
from small_runs import TWO_STEPS, assert_same_run, make_place, same_tensors, train, train_in_parts, weights
from tinyworld import image

from vlmrl.errors import DataError
from vlmrl.recipe.checks import Catalogs, check_recipe
from vlmrl.recipe.load import load_recipe
from vlmrl.store.verify import verify_run
from vlmrl.train import rl
from vlmrl.train.update import fill_logps

ROWS = ("papo", "papo_published", "vppo")


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    return make_place(tmp_path_factory.mktemp("place"), tiny_folder, TWO_STEPS)


@pytest.mark.parametrize("name", ROWS)
def test_the_dependency_of_each_token_is_kept_with_its_response(place, tmp_path, name):
    run = train(place, tmp_path, f'algo.name="{name}"')
    line, groups = run.metrics("train")[0], run.read_rollouts(0)
    kept = [s for g in groups for s in g.samples if s.dependency is not None]
    assert kept and all(len(s.dependency or ()) == s.trajectory.num_trained_tokens for s in kept)
    values = [x for s in kept for x in s.dependency or ()]
    assert min(values) >= 0 and max(values) > 0
    assert line["perception/dependency_mean"] == pytest.approx(math.fsum(values) / len(values), rel=1e-5)
    if name == "vppo":
        shares = [math.ceil(0.2 * len(s.dependency or ())) for s in kept if s.advantage]
        assert line["perception/selected_share"] == pytest.approx(sum(shares) / len(values), rel=1e-6)
    else:
        assert len(kept) == 15
        assert line["perception/kl"] == pytest.approx(line["perception/dependency_mean"], rel=1e-5)
    assert not verify_run(run.dir).errors


def test_a_run_that_measures_nothing_keeps_no_dependency(place, tmp_path):
    run = train(place, tmp_path, "train.steps=1")
    assert {s.dependency for g in run.read_rollouts(0) for s in g.samples} == {None}
    assert not [name for name in run.metrics("train")[0] if name.startswith("perception/")]


@pytest.mark.parametrize("name", ROWS)
def test_resumed_runs_are_the_same(place, tmp_path, name):
    more = (f'algo.name="{name}"', "train.steps=3", "train.updates_per_step=2", "checkpoint.every_steps=1")
    assert_same_run(train_in_parts(place, tmp_path / "a", *more, stops=(1,)), train(place, tmp_path / "b", *more))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masks_that_hide_nothing_have_exactly_no_loss_and_no_gradient(place, tmp_path, dtype):
    """All scores are equal, so that nothing else has a gradient. A mask makes one."""
    more = ('algo.name="papo"', "algo.perception_entropy=0", f'reward.name="{place}/reward.py:same"')
    more = (*more, f'model.dtype="{dtype}"', "train.steps=1", "train.tokens_per_row=200", "algo.importance=none")
    none, some = (train(place, tmp_path, *more, f"algo.mask_share={share}").metrics("train")[0] for share in (0.0, 0.9))
    names = ("loss/total", "optim/grad_norm", "perception/kl", "perception/dependency_mean")
    assert [none[name] for name in names] == [0.0] * 4
    assert some["loss/total"] < 0 and min(some[name] for name in names[1:]) > 0
    assert some["loss/total"] == pytest.approx(-0.01 * some["perception/kl"], rel=1e-5)


def test_the_gradient_through_the_masks_is_papos_alone(place, tmp_path):
    more = ("algo.perception_entropy=0", f'reward.name="{place}/reward.py:same"', "train.steps=1")
    both, one = (train(place, tmp_path, f"algo.name={name}", *more) for name in ("papo", "papo_published"))
    for name in ("loss/total", "perception/kl"):
        assert both.metrics("train")[0][name] == pytest.approx(one.metrics("train")[0][name], rel=1e-6)
    assert both.metrics("train")[0]["optim/grad_norm"] != pytest.approx(one.metrics("train")[0]["optim/grad_norm"])
    assert not same_tensors(weights(both), weights(one))


@pytest.mark.parametrize(("name", "moves"), [("papo", True), ("papo_published", False)])
def test_papos_second_update_masks_under_the_weights_of_the_first(place, tmp_path, monkeypatch, name, moves):
    seen: list[bool] = []

    def watched(policy: Any, optimizer: Any, batch: Any, objective: Any, **more: Any) -> Any:
        prompts, fresh = prompts_of[-1], dict[int, torch.Tensor]()
        fill_logps(policy, batch.behind(prompts), fresh, more["tokens_per_row"])
        pairs = [(batch.masked_logp[i.trajectory], fresh[i.trajectory]) for i in batch.items]
        seen.append(all(torch.equal(a, b) for a, b in pairs))
        return update(policy, optimizer, batch, objective, **more)

    def measured(learner: Any, collected: Any, objective: Any, *rest: Any) -> Any:
        prompts_of.append(rl.masked_prompts(collected, objective.algorithm))
        return measure(learner, collected, objective, *rest)

    prompts_of: list[Any] = []
    update, measure = rl.update, rl.measure_dependency
    monkeypatch.setattr(rl, "update", watched)
    monkeypatch.setattr(rl, "measure_dependency", measured)
    train(place, tmp_path, f'algo.name="{name}"', "train.updates_per_step=2", "train.steps=1")
    assert seen == [True, moves]


def test_what_does_not_go_with_masks_is_refused_in_words(place, tmp_path):
    def problems(*overrides: str, level: str = "error") -> str:
        loaded = load_recipe(place / "rl.toml", overrides=overrides, kind="rl")
        return "\n".join(p.message for p in check_recipe(loaded, Catalogs()) if p.level == level)

    assert "demonstrations" in problems('algo.name="papo"', 'algo.demonstrations="beside"')
    assert "an environment, whose images" in problems('algo.name="vppo"', 'environment.name="x"')
    assert "the surrogate clip_cov, which picks" in problems('algo.name="vppo"', 'algo.surrogate="clip_cov"')
    assert "the surrogate gmpo, which picks" in problems('algo.name="vppo"', 'algo.surrogate="gmpo"')
    assert "`algo.mask_share` is 0" in problems('algo.name="papo"', "algo.mask_share=0", level="warning")
    assert "`algo.mask_patch` does nothing" in problems('algo.name="grpo"', "algo.mask_patch=8", level="warning")
    assert not problems('algo.name="papo"') and not problems('algo.name="vppo"')
    assert not problems('algo.name="papo"', 'algo.surrogate="clip_cov"')


def without_images(place: Path, tmp_path: Path, pictured: int) -> Path:
    """A recipe for PAPO over a table of which only the first rows have an image."""
    image(1).save(tmp_path / "one.png")
    rows = [
        {
            "prompt": f"{'<image>' * (i < pictured)}What is {i}?",
            "images": ["one.png"] * (i < pictured),
            "answer": str(i),
        }
        for i in range(24)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = (place / "rl.toml").read_text().partition("[[data]]")[0]
    table = f'[algo]\nname = "papo"\n[[data]]\npath = "{tmp_path}/rows.jsonl"\nname = "sums"\n'
    (tmp_path / "rl.toml").write_text(text.replace("eval =", "#") + table)
    return tmp_path


@pytest.mark.parametrize(("pictured", "words"), [(0, "no row of `sums`"), (20, "of 24 rows of `sums`")])
def test_rows_without_images_are_named_by_the_commands_that_begin_a_run(place, tmp_path, pictured, words):
    folder = without_images(place, tmp_path, pictured)
    for command in ("check", "train"):
        done = own_process(command, folder / "rl.toml", cwd=folder, new=True)
        said = " ".join((done.out + done.err).split())
        assert done.code == 2 and "Traceback" not in said, said
        assert words in said and "papo masks images" in said and "rows.jsonl" in said, said


def test_a_row_without_images_that_was_not_looked_at_stops_the_run_with_its_name(place, tmp_path):
    with pytest.raises(DataError, match="it has no image for `papo` to mask") as refused:
        train(without_images(place, tmp_path, 0), tmp_path)
    assert "rows.jsonl" in str(refused.value.where)
