"""Runs that look at the picture: what is measured and kept, resume, masks that hide nothing, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from small_runs import TWO_STEPS, make_place, train

from vlmrl.store.verify import verify_run

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
        assert line["perception/kl"] == pytest.approx(line["perception/dependency_mean"], rel=1e-5)
    assert not verify_run(run.dir).errors
