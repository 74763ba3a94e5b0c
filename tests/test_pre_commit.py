"""The hooks of .pre-commit-config.yaml need no network, and the files that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def test_hooks_are_local_and_name_files_that_exist():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    assert {"ruff", "ruff-format", "rules", "pyright"} <= {hook["id"] for hook in hooks}
    for hook in hooks:
        assert hook["language"] == "system" and hook["entry"].startswith((".venv/bin/", "bash -c "))
        assert all((ROOT / path).is_file() for path in re.findall(r"tests/\S+", hook["entry"]))


def test_contributing_names_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    named = set(re.findall(r"\b(?:scripts|tests)/[\w./-]*\w", text))
    modules = {path for path in re.findall(r"`([a-z_/]+/\w+\.py)`", text) if path not in named}
    assert {"scripts/mutate_algo.py", "scripts/fresh-install", "tests/test_docstrings.py"} <= named
    assert not [path for path in sorted(modules) if not (ROOT / "vlmrl" / path).exists()]
    assert not [path for path in sorted(named) if not (ROOT / path).exists()]
