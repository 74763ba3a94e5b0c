"""Identity of a reward: whether two runs, or a run and the current code, have the same reward.

A built-in is identified by its name, its declared version and its arguments; a user's reward by the hash of its source,
its function and its arguments. Neither a file's path nor the text of a built-in's code matters. So code can be moved
and rewritten while runs continue. Of a user's file, only the code that a run can depend on counts.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

MOST_CHARS = 160
"""Maximum length of an argument in words; a hash stands for the rest."""


@dataclass(frozen=True)
class RewardIdentity:
    """Reward as records identify it. Two that are equal give every response the same score.

    Args:
        name: of the built-in, or of the function in a user's file.
        version: of a built-in; None for a user's reward, and if a record does not give it.
        sha256: of a user's source, or of a built-in's if its version is not known; "" otherwise.
        args: the arguments that were given, as JSON values.
        title: name for people: the built-in's name, or `file.py:function`. It is not compared.
        members: the rewards of which it is the sum, in their order; () = it is a single reward.
    """

    name: str
    version: int | None = None
    sha256: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    title: str = field(default="", compare=False)
    members: tuple[MemberIdentity, ...] = ()

    @property
    def code(self) -> str:
        """Version, or source, in words."""
        if self.version is not None:
            return f"version {self.version}"
        return f"source {self.sha256[:12]}" if self.sha256 else "version unknown"

    @property
    def words(self) -> str:
        """Name, version and arguments in one line: `length version 1, max_tokens = 900, soft_tokens = 600`."""
        if self.members:
            return "; ".join(member.words for member in self.members)
        return ", ".join((f"{self.title} {self.code}", *(_argument(self.args, key) for key in sorted(self.args))))

    def beside(self, other: RewardIdentity) -> str:
        """Return the differences to the other identity: `version 2, partial = false`.

        If their names differ, return all of this one. "" for the same reward.
        """
        if self.members or other.members:
            return "; ".join(member.words for member in self.members if member not in other.members) or self.words
        if self.name != other.name:
            return self.words
        keys = sorted(k for k in {*self.args, *other.args} if _argument(self.args, k) != _argument(other.args, k))
        code = [self.code] if (self.version, self.sha256) != (other.version, other.sha256) else []
        return ", ".join([*code, *(_argument(self.args, key) for key in keys)])

    def without_args(self) -> RewardIdentity:
        """Return the same code without its arguments; of several rewards, also without weights and gates."""
        members = tuple(MemberIdentity(member.label, member.reward.without_args()) for member in self.members)
        return replace(self, args={}, members=members)


@dataclass(frozen=True)
class MemberIdentity:
    """One of several rewards as records identify it.

    Args:
        weight: weight of its score in the sum, and `weights`: of its parts within its score.
        gate: the part of another reward that must be above 0; None = no gate.
    """

    label: str
    reward: RewardIdentity
    weight: float = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)
    gate: str | None = None

    @property
    def words(self) -> str:
        """The reward with its label, weight and gate: `grade: math version 1, weight 0.5, if form.tags > 0`."""
        gate = f", if {self.gate} > 0" if self.gate else ""
        return f"{self.label}: {self.reward.words}, weight {self.weight:g}{gate}"


def identity_of(record: Mapping[str, Any]) -> RewardIdentity:
    """Return the identity of the reward of a record: a `reward_record`, new or from an earlier run.

    For a built-in, earlier records have the hash of its source files: `OLD_PRINTS` has the version for it. Nothing is
    raised: a record that lacks something, or was made by a newer vlmrl, equals only records that lack the same.
    """
    name, sha256, version = str(record.get("name")), str(record.get("sha256") or ""), record.get("version")
    if (singles := single_records(record)) != [record]:
        return RewardIdentity(name, title=name, members=tuple(map(_member_of, singles)))
    args = record.get("args")
    args = dict(args) if isinstance(args, Mapping) else {}
    if ".py:" in name:
        return RewardIdentity(name.rpartition(":")[2], None, sha256, args, name)
    if type(version) is not int:
        version = OLD_PRINTS.get(sha256[:16])
    return RewardIdentity(name, version, "" if version is not None else sha256, args, name)


def _member_of(record: Mapping[str, Any]) -> MemberIdentity:
    weight, weights, gate = record.get("weight", 1.0), record.get("weights"), record.get("gate")
    return MemberIdentity(
        str(record.get("label")),
        identity_of(record),
        float(weight) if isinstance(weight, (int, float)) else 1.0,
        dict(weights) if isinstance(weights, Mapping) else {},
        str(gate) if gate else None,
    )


def single_records(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the records of the single rewards in a `reward_record`: those of several rewards, or the record itself."""
    rewards = record.get("rewards")
    if not isinstance(rewards, list) or not rewards:
        return [record]
    return [reward for reward in rewards if isinstance(reward, Mapping)]


def changed_files(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the modules that a user's file imports, and that differ between two records of it, or of its rewards.

    Records of earlier runs do not name them: then none differs.
    """
    names: set[str] = set()
    for old, new in zip(single_records(before), single_records(after), strict=False):
        if "files" in old and "files" in new:
            known, now = dict(old["files"] or {}), dict(new["files"] or {})
            names |= {name for name in known | now if known.get(name) != now.get(name)}
    return sorted(names)


def are_same(file: Path, files: Mapping[str, str]) -> bool:
    """Return whether the modules that a user's file imports are those of a record: relative path -> sha256."""
    try:
        read = {name: hashlib.sha256((file.resolve().parent / name).read_bytes()).hexdigest() for name in files}
    except OSError:
        return False
    return read == dict(files)


def shown_weights(weights: Any) -> str:
    """Return weights in words: `weights answer 0.4, format 0.2`; for a reward without them, `its own weights`."""
    if not isinstance(weights, Mapping) or not weights:
        return "its own weights"
    return "weights " + ", ".join(f"{part} {weight}" for part, weight in weights.items())


def _argument(args: Mapping[str, Any], key: str) -> str:
    if key not in args:
        return f"{key} not given"
    text = json.dumps(args[key], ensure_ascii=False, sort_keys=True, default=str)
    if len(text) > MOST_CHARS:
        text = f"{text[:MOST_CHARS]}... (sha256 {hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:12]})"
    return f"{key} = {text}"


_OF_VERSION_1 = """
    33af6ce6b71c533c 417298b71c4eff44 318bcfe1ff1bb96b 85f8ec906917a90d 862da09b009ecd4e ecf56d182b6127be
    d7f4aaf5fea3a098 de69727f03d5a4a2 3514c7fcb55f199e 3c4716a264f22953 0fbd477e3e78c951 542c38fb4022dfbf
    259752c308b4fd6d f3dba3744d19261e c382426a8327a306 628ee9836500c3ed 2679e24fba1cf9d4 aee684e4e777fdc3
    2ab29a82e8d499ab 3fdfc9f753fd11b2 1db16ae1b2a937c0 182392e22b07e721 2d3f65fc74a82e89 474d1da31d539ba2
    ac40ba36b1770a15 b24a5a6fd2c3ae32 75567d0b211336b3 7577fa41040e3a5f
"""
OLD_PRINTS: Mapping[str, int] = dict.fromkeys(_OF_VERSION_1.split(), 1)
"""First 16 digits of the sha256 as recorded -> version of the reward. No two rewards have the same hash."""


DYNAMIC = re.compile(
    r"\b(?:globals|locals|vars|dir|eval|exec|compile|getattr|attrgetter|importlib|import_module|modules|inspect|gc)\b"
    r"|__(?!(?:future|init|post_init|call|name|main)__)\w+__|coding[:=]"
)
"""Words with which code is reached by a name that is not written out, or a file is read in another encoding."""
UNUSED_IN_RUNS = ("attacks", "prep")
"""Arguments of `Task` that no run uses: the attacks of the probe, and the function that makes the dataset."""


def same_code(before: str, after: str, function: str) -> bool:
    """Return whether two texts of a file give `function` the same code: see `used_code`."""
    return before == after or used_code(before, function) == used_code(after, function)


def used_code(text: str, function: str) -> str:
    """Return a file without comments and formatting, `attacks` and `prep` of `Task`, and functions that nothing names.

    Only plain functions are left out: a decorator, or a call as a default, may do something when the file is imported.
    The whole text is returned if it cannot be parsed, or if it may reach code by computed names.
    """
    try:
        tree = _Kept().visit(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError):
        return text
    if DYNAMIC.search(text):
        return text
    while True:
        uses = Counter(_names(tree))
        unused = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
            and _is_plain(node)
            and node.name != function
            and uses[node.name] == Counter(_names(node))[node.name]  # only in itself, where its definition counts, too
        ]
        if not unused:
            return ast.unparse(tree)
        tree.body = [node for node in tree.body if node not in unused]


class _Kept(ast.NodeTransformer):
    """Removes the arguments that no run uses from calls of `Task`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if getattr(node.func, "attr", getattr(node.func, "id", "")) == "Task":
            node.keywords = [one for one in node.keywords if one.arg not in UNUSED_IN_RUNS]
        return self.generic_visit(node)


def _is_plain(node: ast.FunctionDef) -> bool:
    """Return whether the definition of a function does nothing but define it."""
    evaluated = [*node.args.defaults, *node.args.kw_defaults, node.returns]
    evaluated += [one.annotation for one in ast.walk(node.args) if isinstance(one, ast.arg)]
    simple = all(one is None or isinstance(one, (ast.Constant, ast.Name)) for one in evaluated)
    return simple and not node.decorator_list


def _names(node: ast.AST) -> Iterator[str]:
    """Yield all names in a tree, as often as they stand there: of variables, attributes, definitions, and in texts."""
    for one in ast.walk(node):
        for kind in ("id", "attr", "name", "asname", "arg"):
            if isinstance(name := getattr(one, kind, None), str):
                yield name
        if isinstance(one, (ast.Global, ast.Nonlocal)):
            yield from one.names
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield from re.findall(r"\w+", one.value)
