"""Responses of evaluations, read as rollouts: what is there, what older files lack, and damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from evaluation_builders import row
from reward_runs import make_pair_run

from vlmrl.errors import RewardError, StoreError
from vlmrl.evaluate.metrics import summarise
from vlmrl.evaluate.records import Evaluation, write_evaluation
from vlmrl.reward_check.rescore import own_rewards
from vlmrl.reward_check.responses import count_saved, is_evaluated
from vlmrl.reward_check.scoring import SavedSample, open_saved
from vlmrl.rewards import reward_record
from vlmrl.store.runs import Run
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import Media

ROWS = [row("p0"), row("p0", sample=1, score=None, error="boom", parts={}), row("p1", images=("c",), num_tokens=None)]


def evaluated(run: Run, name: str, rows: list[dict[str, Any]] = ROWS, **meta: Any) -> Path:
    write_evaluation(run.dir / "eval" / name, Evaluation(rows, summarise(rows)), {"split": "test", **meta})
    return run.dir / "eval" / name / "rows.parquet"


def samples_of(path: Path, root: Path) -> list[SavedSample]:
    return list(open_saved(str(path), root).pick(range(9)).values())


def test_the_rows_of_an_evaluation_are_responses_of_its_run(tmp_path: Path) -> None:
    run = make_pair_run(tmp_path)
    path = evaluated(run, "test")
    saved = open_saved(str(path), tmp_path)
    assert saved.run is not None and saved.run.id == run.id and saved.evaluations == ["test"]
    samples = list(saved.pick(range(9)).values())
    first = samples[0]
    assert [(s.prompt_id, s.input.sample) for s in samples] == [("p0", 0), ("p0", 1), ("p1", 0)]
    assert first.where == "evaluation test, row p0 of digits, sample 0"
    assert (first.input.response, first.input.num_tokens, first.input.finish) == ("<answer>0.9</answer>", 5, "stop")
    assert (first.input.prompt, dict(first.input.columns)) == ("Are they the same?", {"question": "the same?"})
    assert dict(first.input.truth) == {"same": True, "distance": 0}
    assert first.media == (Media("a", 8, 6), Media("b", 8, 6)) and samples[2].media == (Media("c", 8, 6),)
    assert first.score is not None and (first.score.value, first.score.parts) == (0.5, {"format": 1.0, "digit": None})
    assert samples[1].score is not None and samples[1].score.error == "boom"
    assert samples[2].input.num_tokens == 0, "the endpoint did not tell it"
    facts = [s.step for s in samples]
    assert facts == [0, 0, 0] and count_saved(path) == 3 and is_evaluated(path)


def test_groups_are_the_prompts_also_where_a_batch_ends_within_one(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("vlmrl.reward_check.responses.CHUNK_ROWS", 2)
    rows = [row(f"p{n // 3}", sample=n % 3) for n in range(9)]
    saved = open_saved(str(evaluated(make_pair_run(tmp_path), "test", rows)), tmp_path)
    decoder = saved.reader
    groups = [g for chunk in saved.reader.chunks() for g in decoder.decode(chunk).facts.groups_N.tolist()]
    assert groups == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_run_without_rollouts_has_the_responses_of_its_evaluations(tmp_path: Path) -> None:
    run = make_pair_run(tmp_path)
    for name in ("test", "other"):
        evaluated(run, name)
    assert open_saved("last", tmp_path).evaluations == []
    for file in run.rollout_files().values():
        file.unlink()
    saved = open_saved("last", tmp_path)
    assert saved.evaluations == ["other", "test"] and len(saved.pick(range(9))) == 6
    with pytest.raises(StoreError, match="no saved rollouts in steps 1 to 1"):
        open_saved("last", tmp_path, steps=(0, 0))


def test_an_evaluation_is_checked_with_the_reward_that_scored_it(tmp_path: Path) -> None:
    run = make_pair_run(tmp_path)
    other = load_reward("taxonomy", args={"levels": ["loop"], "partial": False})
    meta = {"source": "digits", "reward": reward_record(other, {"answer": 1.0}), "reward_args": dict(other.args)}
    chosen = own_rewards(open_saved(str(evaluated(run, "other", **meta)), tmp_path))["digits"]
    assert (chosen.spec.args, chosen.weights, chosen.changed) == (other.args, {"answer": 1.0}, "")
    of_run = open_saved(str(evaluated(run, "own")), tmp_path)
    assert own_rewards(of_run)["digits"].spec.args == own_rewards(open_saved("last", tmp_path))["digits"].spec.args
    evaluated(run, "third", **{**meta, "reward": reward_record(other, {"answer": 0.5})})
    for file in run.rollout_files().values():
        file.unlink()
    saved = open_saved("last", tmp_path)
    assert saved.notes[0].startswith("digits: evaluations by several rewards; name the rows of one: <run>/eval/")
    with pytest.raises(RewardError, match="not recorded which reward"):
        own_rewards(saved)


def test_an_older_evaluation_lacks_prompts_and_columns(tmp_path: Path) -> None:
    path = evaluated(make_pair_run(tmp_path), "test")
    table = pq.read_table(path).drop_columns(["columns", "prompt_text"])
    pq.write_table(table, path)
    first = samples_of(path, tmp_path)[0]
    assert (first.input.prompt, dict(first.input.columns), first.score.value) == ("", {}, 0.5)  # type: ignore[union-attr]


def test_damage_and_newer_files_are_errors(tmp_path: Path) -> None:
    path = evaluated(make_pair_run(tmp_path), "test")
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"vlmrl.schema": "99"}), path)
    with pytest.raises(StoreError, match="has schema '99'"):
        open_saved(str(path), tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(StoreError, match="damaged"):
        open_saved(str(path), tmp_path)
