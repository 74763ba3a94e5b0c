from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from reward_runs import make_pair_run

from vlmrl.algo.algorithms import resolve
from vlmrl.reward_check.rescore import Estimate, advantages_of, diff_rewards, estimate_of, own_rewards, scan_saved
from vlmrl.reward_check.responses import ResponseColumns
from vlmrl.reward_check.scores import Coded, Scores
from vlmrl.reward_check.scoring import SavedResponses, open_saved
from vlmrl.types import Score


def saved_groups(*sizes: int, finish: str = "stop") -> tuple[SavedResponses, ResponseColumns]:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    n = len(groups)
    zeros, names = np.zeros(n, np.int32), Coded(np.zeros(n, np.int32), ["s"])
    facts = ResponseColumns(
        np.arange(n),
        np.arange(n),
        zeros,
        zeros,
        groups,
        zeros,
        names,
        names,
        np.full(n, finish == "length"),
        zeros,
        zeros,
        np.zeros(n),
    )
    return SavedResponses(Path("x"), None, {}), facts  # type: ignore[arg-type]


def scores(*values: float | None, part: str = "a") -> Scores:
    return Scores.of([Score(math.nan, {}, error="e") if v is None else Score(v, {part: v}) for v in values])


def test_the_advantages_of_a_run_are_recomputed_as_they_were(tmp_path):
    make_pair_run(tmp_path)
    saved = open_saved("last", tmp_path)
    found = scan_saved(saved, [own_rewards(saved)])
    facts, again = found.facts, found.sides[0]
    assert advantages_of(saved, facts, again, estimate_of(saved)).tolist() == facts.advantages_N.tolist()
    same = diff_rewards(saved, facts, again, again)
    assert same["value"]["moved"] == 0 and same["groups"]["died"] == same["groups"]["revived"] == 0
    assert same["groups"]["same_order"] == pytest.approx(1.0, abs=1e-12) and same["changed"] == []
    assert same["value"]["rank_correlation"] == pytest.approx(1.0, abs=1e-12) and same["value"]["changed"] == 0


def test_dead_and_revived_groups_and_best_samples_by_hand():
    saved = saved_groups(2, 2, 2, 2)
    first = scores(1, 0, 1, 1, 1, 0, 0, 0)  # alive, dead, alive, dead
    second = scores(0, 1, 1, 0, 1, 1, 0, 0)  # turned, revived, died, dead
    groups = diff_rewards(*saved, first, second)["groups"]
    assert groups == {
        "number": 4,
        "dead_first": 2,
        "dead_second": 2,
        "died": 1,
        "revived": 1,
        "alive_in_both": 1,
        "best_changes": 1,
        "same_order": pytest.approx(-1.0, abs=1e-12),
    }


def test_advantages_by_hand():
    saved = saved_groups(2, 2)
    found = diff_rewards(*saved, scores(1, 0, 2, 2), scores(0, 1, 3, 1))
    # (1, 0): mean 0.5, std sqrt(0.5) -> 0.5 / (0.70710678 + 1e-6); (2, 2): 0. Second: signs of group 1 turn.
    one = 0.5 / (math.sqrt(0.5) + 1e-6)
    two = 1.0 / (math.sqrt(2.0) + 1e-6)
    assert found["advantages"]["flipped_share"] == 0.5
    assert found["advantages"]["moved"] == pytest.approx((2 * one * 2 + 2 * two) / 4, abs=1e-12)
    assert found["value"]["first"] == 1.25 and found["value"]["second"] == 1.25
    assert found["value"]["moved"] == 1.0 and found["value"]["changed_share"] == 1.0


def test_rows_whose_score_stays_are_not_among_the_most_changed():
    """The advantage of a sample also changes if another sample of its group changes."""
    found = diff_rewards(*saved_groups(3, 2), scores(0, 0, 1, 0, 1), scores(0, 0.5, 1, 0, 1))
    assert [row["row"] for row in found["changed"]] == [1]


def test_order_within_groups_uses_ranks_with_ties():
    saved = saved_groups(4)
    found = diff_rewards(*saved, scores(1, 2, 3, 4), scores(10, 10, 20, 500))
    # ranks (0, 1, 2, 3) and (0.5, 0.5, 2, 3): cov 4.5, sums of squares 5 and 4.5 -> 4.5 / sqrt(22.5)
    assert found["groups"]["same_order"] == pytest.approx(4.5 / math.sqrt(22.5), abs=1e-12)
    assert found["groups"]["best_changes"] == 0


def test_a_best_sample_that_stays_among_the_best_has_not_changed():
    saved = saved_groups(3)
    assert diff_rewards(*saved, scores(1, 1, 0), scores(0, 1, 0))["groups"]["best_changes"] == 0
    assert diff_rewards(*saved, scores(1, 1, 0), scores(0, 0, 1))["groups"]["best_changes"] == 1


def test_parts_that_exist_on_one_side_only():
    saved = saved_groups(2)
    found = diff_rewards(*saved, scores(1, 0), scores(0.5, 0.5, part="b"))
    assert found["parts"] == {
        "a": {"first": 0.5, "second": None, "changed_share": 1.0},
        "b": {"first": None, "second": 0.5, "changed_share": 1.0},
    }


def test_failed_rows_are_left_out_on_both_sides():
    saved = saved_groups(3)
    found = diff_rewards(*saved, scores(1, None, 0), scores(1, 5, None))
    assert found["compared"] == 1 and found["failed"] == {"first": 1, "second": 1}
    assert found["value"]["first"] == 1.0


def test_truncated_responses_are_dropped_as_the_recipe_says():
    saved = saved_groups(2, finish="length")
    assert advantages_of(*saved, scores(1, 0), Estimate(resolve("dr_grpo"), 8)).tolist() == [0.5, -0.5]
    assert advantages_of(*saved, scores(1, 0), Estimate(resolve("dr_grpo", truncated="drop"), 8)).tolist() == [0.0, 0.0]
