"""Names that do not exist: the nearest one that does, in one wording everywhere."""

from __future__ import annotations

from pathlib import Path

import vlmrl
from vlmrl.errors import DataError, RecipeError, did_you_mean, listed, nearest, unknown


def test_the_nearest_name_is_found_whatever_the_case_of_its_letters():
    assert nearest("Gprp", ["grpo", "GSPO", "rloo"]) == "grpo"
    assert nearest("gspp", ["grpo", "GSPO", "rloo"]) == "GSPO"
    assert nearest("zzz", ["grpo"]) is None and nearest("x", []) is None
    assert nearest("lines", ["length"], cutoff=0.9) is None and nearest("lines", ["length"], cutoff=0.3) == "length"


def test_a_hint_lists_the_names_with_the_nearest_first():
    assert listed("gprp", ["grpo", "rloo"]) == "did you mean `grpo`?  known: grpo, rloo"
    assert listed("zzz", ["grpo"], "rows") == "rows: grpo"
    assert listed("zzz", []) == "known: none"
    assert did_you_mean("gprp", ["grpo"], "see the list") == "did you mean `grpo`?  see the list"


def test_an_error_names_what_is_unknown_and_what_is_known():
    error = unknown("task", "digit", ["digits"])
    assert type(error) is RecipeError and error.message == "unknown task `digit`"
    error = unknown("style", "x", ["trl"], error=DataError, whose=" of task `t`", more="; or none")
    assert type(error) is DataError and error.message == "unknown style `x` of task `t`"
    assert error.hint == "known: trl; or none"


def test_no_other_file_looks_for_the_nearest_name_by_itself():
    root = Path(vlmrl.__file__).parent
    files = {p.relative_to(root).as_posix() for p in root.rglob("*.py") if "get_close_matches" in p.read_text("utf-8")}
    assert files == {"errors.py"}
