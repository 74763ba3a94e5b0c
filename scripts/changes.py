"""Changed files of a branch or between two commits, for the scripts that check changes of words."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("vlmrl", "tests", "scripts")


def git(*words: str) -> str:
    """Run git in the repository and return its output. Raises: SystemExit with git's message."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(f"error: git {' '.join(words)}: {done.stderr.strip()}", file=sys.stderr)
        sys.exit(2)
    return done.stdout


def default_base(head: str | None) -> str:
    """Return the commit at which a branch left main.

    Where the branch has no commit of its own, return HEAD if the working tree has changes, else the parent of HEAD.
    """
    here = git("rev-parse", head or "HEAD").strip()
    common = subprocess.run(["git", "merge-base", here, "main"], cwd=ROOT, capture_output=True, text=True)
    if common.returncode == 0 and common.stdout.strip() != here:
        return common.stdout.strip()
    if head is None and git("status", "--porcelain", "--untracked-files=no").strip():
        return here
    return git("rev-parse", f"{here}~1").strip()


def changed_files(base: str, head: str | None, paths: Sequence[str], ending: str = ".py") -> list[tuple[str, str]]:
    """Return (status, path) of every changed file with this ending. Files that git does not track are left out.

    Args:
        head: commit after the change; None = the working tree.
        paths: files, and folders that are searched with all their subfolders.
    Returns: status M (modified), A (added) or D (deleted); a renamed file is one D and one A.
    """
    listed = git("diff", "--no-renames", "--name-status", base, *([head] if head else []), "--", *paths)
    rows = [line.split("\t") for line in listed.splitlines()]
    return [(row[0], row[1]) for row in rows if row[1].endswith(ending)]


def source_at(commit: str | None, path: str) -> str:
    """Return a file's text at a commit; None = in the working tree."""
    return git("show", f"{commit}:{path}") if commit else (ROOT / path).read_text("utf-8")


def add_commits(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which commits and which files are compared."""
    parser.add_argument("--base", help="commit before the change; default: where the branch left main, else the parent")
    parser.add_argument("--head", help="commit after the change; default: the working tree")
    parser.add_argument("paths", nargs="*", default=FOLDERS, help=f"folders or files; default: {' '.join(FOLDERS)}")
