#!/usr/bin/env python3
"""List the facts of changed texts that the new text no longer states, for a reviewer to look through.

A fact is a number (in digits or as a word), a unit, an arXiv id, a name in backticks or double quotes, an identifier,
a shape or range in brackets, the name of an exception, a capitalised name. The old docstring, comments and strings of
each definition are compared with the new ones of the same definition. Markdown files, where their paths are given, are
compared by section.

    gone    the new file states it nowhere
    moved   it stands elsewhere in the new file, not in this definition

Exit code 0, whatever is listed: a fact may go on purpose.

    scripts/lost_facts.py                    the working tree against the branch's base (else its parent commit)
    scripts/lost_facts.py --base A --head B  two commits
    scripts/lost_facts.py README.md docs     pages
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from dataclasses import dataclass

from changes import add_commits, changed_files, default_base, source_at

WORDS = (
    "at most|at least|exactly|never|always|only|two|three|four|five|six|seven|eight|nine|ten|twelve|hundred|thousand"
    "|million|billion|half|third|quarter|twice"
)
UNITS = (
    "B kB MB GB TB KiB MiB GiB byte bytes bit bits ms s second seconds minute minutes hour hours day days step steps"
    " token tokens pixel pixels megapixel nat nats px GPU GPUs rank ranks character characters row rows sample samples"
    " response responses prompt prompts percent share float32 float64 bfloat16 int64 bool"
)
PATTERNS = {
    "arXiv": re.compile(r"\b\d{4}\.\d{4,5}\b"),
    "name": re.compile(r"`([^`\n]+)`"),
    "quoted": re.compile(r"\"([^\"\s]{1,40})\""),
    "shape": re.compile(r"[\[(][A-Za-z0-9_.+\-*/^ ]*(?:, ?[A-Za-z0-9_.+\-*/^ ]+)*[\])](?=[\s.,;:)\[]|$)"),
    "number": re.compile(r"(?<![\w.])[-+]?\d[\d,_]*(?:\.\d+)?(?:e[-+]?\d+)?%?"),
    "error": re.compile(r"\b[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)\b"),
    "identifier": re.compile(r"\b[A-Za-z]\w*_\w+\b|--[a-z][\w-]+"),
    "unit": re.compile(rf"(?<!['\w])(?:{'|'.join(UNITS.split())})\b"),
    "word": re.compile(rf"\b(?:{WORDS})\b", re.IGNORECASE),
    "capitalised": re.compile(r"\b[A-Z][A-Za-z0-9]*(?:[-+.][A-Za-z0-9]+)*\b"),
}
"""Kind of fact -> what it looks like."""
SENTENCE_START = re.compile(r"(?:^|[.:;!?\n]\s+|[-(*#]\s*|\n\s*|\"\"\"\s*)$")


@dataclass(frozen=True)
class Lost:
    """A fact of an old text that the new text of the same place does not state. `elsewhere`: but the new file does."""

    place: str
    kind: str
    fact: str
    elsewhere: bool


def facts(text: str) -> dict[str, str]:
    """Return fact -> its kind. Numbers lose their commas, so that 1,000 is 1000."""
    kinds: dict[str, str] = {}
    for kind, pattern in PATTERNS.items():
        for match in pattern.finditer(text):
            fact = (match[1] if pattern.groups else match[0]).strip()
            if kind == "capitalised" and not _is_name(fact, text[: match.start()]):
                continue
            if kind == "shape" and not re.search(r"[\[\d]|[A-Z]\b", fact):
                continue  # an ordinary word in parentheses
            fact = fact.replace(",", "").replace("_", "") if kind == "number" else fact
            fact = fact.lower() if kind == "word" else fact
            fact = fact.rstrip("s") or fact if kind == "unit" else fact  # a token is the same unit as tokens
            kinds.setdefault(fact, kind)
    return kinds


def _is_name(word: str, before: str) -> bool:
    """Return whether a capitalised word is a name: it has a capital or a digit inside, or begins no sentence."""
    inner = any(c.isupper() or c.isdigit() for c in word[1:])
    return inner or (len(word) > 1 and not SENTENCE_START.search(before))


def assigned_name(statement: ast.stmt, scope: str) -> str:
    """Return the name of the attribute or constant that a statement assigns; else that of its scope."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    if isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(targets[0], ast.Name):
        return targets[0].id if scope == "module" else f"{scope}.{targets[0].id}"
    return scope


def python_texts(source: str) -> dict[str, str]:
    """Return definition -> its docstring, strings and comments, inner functions included.

    A definition is "module", a function, a class, a method ("Class.method"), or an attribute or constant with the
    string below it ("Class.key", "LIMIT").
    """
    tree = ast.parse(source)
    owner: dict[int, str] = {}  # line -> definition
    texts: dict[str, list[str]] = defaultdict(list)

    def walk(node: ast.AST, name: str) -> None:
        attribute = name
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt) and isinstance(node, (ast.Module, ast.ClassDef)):
                is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
                attribute = attribute if is_text else assigned_name(child, name)
            inner = attribute
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = child.name if name == "module" else f"{name}.{child.name}"
                inner = name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else inner
                owner.update(dict.fromkeys(range(child.lineno, (child.end_lineno or child.lineno) + 1), inner))
            elif isinstance(child, ast.Constant) and isinstance(child.value, str):
                texts[inner].append(child.value)
            walk(child, inner)

    walk(tree, "module")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            texts[owner.get(token.start[0], "module")].append(token.string.lstrip("#: "))
    return {name: "\n".join(parts) for name, parts in texts.items()}


def markdown_texts(source: str) -> dict[str, str]:
    """Return heading -> the text below it."""
    texts: dict[str, list[str]] = defaultdict(list)
    heading = "(top)"
    for line in source.splitlines():
        heading = line.lstrip("# ") if line.startswith("#") else heading
        texts[heading].append(line)
    return {name: "\n".join(lines) for name, lines in texts.items()}


def lost(old: dict[str, str], new: dict[str, str]) -> list[Lost]:
    """Return the facts of each old text that the new text of the same name does not state, in order."""
    whole = "\n".join(new.values())
    everywhere = facts(whole)

    def stated(fact: str, known: dict[str, str], in_text: str) -> bool:
        return fact in known or re.search(rf"(?<!\w){re.escape(fact)}(?!\w)", in_text) is not None

    result = []
    for place, text in old.items():
        if text == new.get(place):
            continue
        here = new.get(place, "")
        known = facts(here)
        missing = {fact: kind for fact, kind in facts(text).items() if not stated(fact, known, here)}
        result += [Lost(place, kind, fact, stated(fact, everywhere, whole)) for fact, kind in missing.items()]
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_commits(parser)
    options = parser.parse_args()
    base = options.base or default_base(options.head)
    count = 0
    for ending, read in ((".py", python_texts), (".md", markdown_texts)):
        for status, path in changed_files(base, options.head, list(options.paths), ending):
            if status == "A":
                continue
            new = read(source_at(options.head, path)) if status == "M" else {}
            missing = lost(read(source_at(base, path)), new)
            count += len(missing)
            for place in dict.fromkeys(m.place for m in missing):
                print(f"{path}  {place}")
                for word, elsewhere in (("gone ", False), ("moved", True)):
                    names = [f"{m.fact} ({m.kind})" for m in missing if (m.place, m.elsewhere) == (place, elsewhere)]
                    print(f"  {word}  {', '.join(names)}") if names else None
    print(f"{count} facts to look at, since {base[:10]}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
