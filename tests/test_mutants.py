"""Every mutant of scripts/mutate_*.py still has its text, once: what nobody runs daily must not go stale."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["mutate_algo", "mutate_house"])
def test_each_mutant_changes_one_place_of_the_code_as_it_is(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    for module in ("mutate_algo", "mutate_house"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    mutants = import_module(name).MUTANTS
    sources = {file: (ROOT / file).read_text("utf-8") for file, *_ in mutants}
    stale = [f"{file}: {old!r}" for file, old, _, _ in mutants if sources[file].count(old) != 1]
    assert not stale, "\n".join(stale)
    assert all((ROOT / test).exists() for *_, tests in mutants for test in tests)
    assert all(old != new for _, old, new, _ in mutants)
