"""Every mutant of scripts/mutate_algo.py still has its text, once: what nobody runs daily must not go stale."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_each_mutant_changes_one_place_of_the_code_as_it_is():
    spec = importlib.util.spec_from_file_location("mutate_algo", ROOT / "scripts/mutate_algo.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    sources = {file: (ROOT / file).read_text("utf-8") for file, *_ in script.MUTANTS}
    stale = [f"{file}: {old!r}" for file, old, _, _ in script.MUTANTS if sources[file].count(old) != 1]
    assert not stale, "\n".join(stale)
    assert all((ROOT / test).exists() for *_, tests in script.MUTANTS for test in tests)
    assert all(old != new for _, old, new, _ in script.MUTANTS)
