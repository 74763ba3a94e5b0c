"""Stored judgements are read where none may write."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmrl.services.judge_database import JUDGEMENTS, JudgementCache, StoredJudgements
from vlmrl.services.rubric import VFIG, Judgement
from vlmrl.services.shared_file import Database

COUNTS = {"input_tokens": 1, "output_tokens": 1, "seconds": 0.1}


def judgement(number: float) -> Judgement:
    return Judgement(dict.fromkeys(VFIG.names, number), "why")


@pytest.mark.parametrize("is_open", [False, True])
def test_stored_judgements_are_read_and_never_written(tmp_path: Path, is_open: bool) -> None:
    path, notes = tmp_path / "judge.sqlite", []
    database = Database(JUDGEMENTS, path)
    JudgementCache(database, VFIG).keep("key", judgement(0.25), **COUNTS)
    if not is_open:
        database.close()
    before = sorted(file.name for file in tmp_path.iterdir())
    stored = StoredJudgements(path, VFIG, notes.append)
    assert stored.get("key") == judgement(0.25) and stored.get("other") is None and notes == []
    assert sorted(file.name for file in tmp_path.iterdir()) == before
    stored.close()
    database.close()


def test_stored_judgements_that_cannot_be_read_are_told_once(tmp_path: Path) -> None:
    path, notes = tmp_path / "judge.sqlite", []
    path.write_bytes(b"no database at all, but long enough to look like one" * 20)
    stored = StoredJudgements(path, VFIG, notes.append)
    assert stored.get("key") is None and stored.get("key") is None
    assert len(notes) == 1 and str(path) in notes[0]
    missing = StoredJudgements(tmp_path / "none.sqlite", VFIG, notes.append)
    assert missing.get("key") is None and len(notes) == 1 and not (tmp_path / "none.sqlite").exists()
