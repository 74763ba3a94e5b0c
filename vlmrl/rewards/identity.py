"""The identity of a reward: the same one in two runs, or in a run and in the code of today.

A built-in is known by its name, its declared version and its arguments; a reward of the user's own by the hash of its
source, its function and its arguments. Neither a file's place nor how a built-in is written matters, so that code can
be moved and rewritten under runs that go on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vlmrl.rewards.old_prints import OLD_PRINTS


@dataclass(frozen=True)
class RewardIdentity:
    """A reward as records know it. Two that are equal score every response alike.

    Args:
        name: of the built-in, or of the function in a user's file.
        version: of a built-in; None for a user's reward, and where a record does not tell it.
        sha256: of a user's source, or of a built-in's where its version is not known; "" otherwise.
        args: the arguments that were given, as JSON values.
        title: what people call it: the built-in's name, or `file.py:function`. It makes no difference.
    """

    name: str
    version: int | None = None
    sha256: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    title: str = field(default="", compare=False)

    @property
    def code(self) -> str:
        """The version, or the source, in words."""
        if self.version is not None:
            return f"version {self.version}"
        return f"source {self.sha256[:12]}" if self.sha256 else "version unknown"

    @property
    def words(self) -> str:
        """Name, version and arguments in one line: `length version 1, max_tokens = 900, soft_tokens = 600`."""
        return ", ".join((f"{self.title} {self.code}", *(_argument(self.args, key) for key in sorted(self.args))))

    def beside(self, other: RewardIdentity) -> str:
        """Return what this one has that the other has otherwise: `version 2, partial = false`; all of it if they have
        different names. "" for the same reward.
        """
        if self.name != other.name:
            return self.words
        keys = sorted(k for k in {*self.args, *other.args} if _argument(self.args, k) != _argument(other.args, k))
        code = [self.code] if (self.version, self.sha256) != (other.version, other.sha256) else []
        return ", ".join([*code, *(_argument(self.args, key) for key in keys)])

    def without_args(self) -> RewardIdentity:
        """Return the same code, whatever its arguments."""
        return replace(self, args={})


def identity_of(record: Mapping[str, Any]) -> RewardIdentity:
    """Return the identity of the reward of a record: a `reward_record`, of today or of a run made earlier.

    Of a built-in, earlier records have the hash of its source files: `old_prints` says which version that was. Nothing
    is raised: a record that lacks something, or was made by a newer vlmrl, is equal to those alone that lack the same.
    """
    name, sha256, version = str(record.get("name")), str(record.get("sha256") or ""), record.get("version")
    args = record.get("args")
    args = dict(args) if isinstance(args, Mapping) else {}
    if ".py:" in name:
        return RewardIdentity(name.rpartition(":")[2], None, sha256, args, name)
    if type(version) is not int:
        version = OLD_PRINTS.get(sha256)
    return RewardIdentity(name, version, "" if version is not None else sha256, args, name)


def shown_weights(weights: Any) -> str:
    """Return weights in words: `weights answer 0.4, format 0.2`; of a reward that has none, `its own weights`."""
    if not isinstance(weights, Mapping) or not weights:
        return "its own weights"
    return "weights " + ", ".join(f"{part} {weight}" for part, weight in weights.items())


def _argument(args: Mapping[str, Any], key: str) -> str:
    if key not in args:
        return f"{key} not given"
    return f"{key} = {json.dumps(args[key], ensure_ascii=False, sort_keys=True, default=str)}"
