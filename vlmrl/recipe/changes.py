"""What may change in a run that goes on. Every key of a recipe has its rule in `TABLE`; `compare_recipes` applies it.

free      what is learned does not depend on it (beyond rounding): it changes without a word
asked     it changes what is learned: shown, and wanted with --accept-changes; a fork (`--from`) just lists it
refused   the checkpoint does not fit it
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vlmrl.recipe.load import LoadedRecipe, leaves, with_defaults
from vlmrl.recipe.paths import PATH_KEYS
from vlmrl.recipe.toml_lines import Key, dotted

Kind = Literal["free", "asked", "refused"]
Restart = Literal["best", "kl"]
"""What a change begins anew: the best validation and its patience, or the steered KL coefficient."""


@dataclass(frozen=True)
class Rule:
    """The rule of some keys, as dotted names without list positions.

    Args: reason: why, as said to the user; of a refused key also what to do instead.    restarts: what begins anew.
    """

    kind: Kind
    reason: str
    keys: tuple[str, ...]
    restarts: tuple[Restart, ...] = ()


MOVED = Rule("free", "where a file is; what is in it is compared by its hash", ("data.path", "data.prompt"))
"""Also of a reward function whose file has another place, see `_rule`."""

TABLE = (
    Rule("free", "how long the run goes on", (
        "train.steps", "train.epochs", "train.max_seconds", "train.stop_above", "eval.patience",
    )),
    Rule("free", "when something is looked at or kept", (
        "eval.every_steps", "eval.enabled", "eval.at_start", "checkpoint.every_steps", "checkpoint.keep_last",
        "checkpoint.keep_best", "checkpoint.asynchronous", "log.sample_every_steps", "log.keep_rollouts",
        "log.keep_rollouts_every", "paper",
    )),
    Rule("free", "where the numbers are shown", ("log.sinks", "log.project", "log.entity", "log.group", "log.name")),
    Rule("free", "where and how fast the same numbers are computed", (
        "model.device", "model.gradient_checkpointing", "model.shared_prefix", "train.tokens_per_row",
        "train.rehearsal", "rollout.batch_tokens", "rollout.kv_cache_gib", "rollout.engine_gpus",
        "rollout.tensor_parallel", "parallel.timeout_seconds", "parallel.shard_size", "parallel.offload",
        "reward.timeout_seconds", "reward.memory_mb", "reward.workers",
    )),
    Rule("free", "a bound that stops a run, or a permission", (
        "rollout.max_sync_gap", "rollout.max_prompt_tokens", "rollout.allow_filtered_sampling",
        "model.trust_remote_code", "reward.on_unavailable",
    )),
    MOVED,
    Rule("asked", "the rows", (
        "data.name", "data.task", "data.share", "data.split", "data.images_root", "data.columns", "data.max_rows",
    )),
    Rule("asked", "the order of the rows, and every sample", ("train.seed",)),
    Rule("asked", "the prompt and its images", (
        "data.variant", "data.system", "model.min_pixels", "model.max_pixels", "model.thinking",
    ), ("best",)),
    Rule("asked", "the reward", (
        "data.reward", "reward.name", "reward.profile", "reward.style", "reward.args", "reward.weights",
        "reward.on_timeout",
    ), ("best",)),
    Rule("asked", "what validation measures", (
        "data.validation", "reward.accuracy", "eval.metric", "eval.goal", "eval.max_rows", "eval.max_new_tokens",
        "eval.allow_test_split",
    ), ("best",)),
    Rule("asked", "the algorithm and the weight of its KL", (
        "algo.name", "algo.kl", "algo.kl_in", "algo.kl_coef", "algo.kl_target",
    ), ("kl",)),
    Rule("asked", "the algorithm", (
        "algo.advantage", "algo.scale", "algo.gamma", "algo.gae_lambda", "algo.value_coef", "algo.value_clip",
        "algo.ratio", "algo.surrogate", "algo.clip_low", "algo.clip_high", "algo.dual_clip", "algo.tau_positive",
        "algo.tau_negative", "algo.cov_share", "algo.cov_low", "algo.cov_high", "algo.cov_kl_coef", "algo.aggregation",
        "algo.kl_horizon", "algo.entropy_coef", "algo.filter", "algo.min_spread", "algo.filter_tries",
        "algo.importance", "algo.importance_level", "algo.importance_cap", "algo.overlong_tokens",
        "algo.overlong_penalty", "algo.truncated_score", "algo.count_dead", "algo.truncated",
    )),
    Rule("asked", "the sampling", (
        "rollout.engine", "rollout.prompts_per_step", "rollout.samples_per_prompt", "rollout.temperature",
        "rollout.top_p", "rollout.top_k", "rollout.overlap",
    )),
    Rule("asked", "where a sampled and a validated response ends", (
        "rollout.max_new_tokens", "rollout.stop",
    ), ("best",)),
    Rule("asked", "the update", (
        "train.rows_per_step", "train.updates_per_step", "lora.dropout", "optim.lr", "optim.schedule",
        "optim.warmup_steps", "optim.warmup_ratio", "optim.min_lr_ratio", "optim.weight_decay", "optim.beta1",
        "optim.beta2", "optim.max_grad_norm",
    )),
    Rule("refused", "sft and rl are different runs: start a new one from the weights, --set model.path=RUN", ("kind",)),
    Rule("refused", "the weights are the checkpoint's: start a new run from the other model", (
        "model.path", "model.revision",
    )),
    Rule("refused", "the saved weights and moments are of this type: start a new run from the weights, "
                    "--set model.path=RUN", ("model.dtype",)),
    Rule("refused", "the checkpoint holds the moments of what was trained, no others: start a new run from the "
                    "weights, --set model.path=RUN", ("model.freeze", "optim.name")),
    Rule("refused", "the checkpoint holds this adapter and no other: fold it in with `vlmrl merge RUN --out FOLDER`, "
                    "then start a new run, --set model.path=FOLDER", (
        "lora.rank", "lora.alpha", "lora.targets", "lora.exclude", "lora.vision", "lora.rslora", "lora.dora",
        "model.quantize",
    )),
)  # fmt: skip
"""The one place that says what may change."""

SOURCES = Rule("asked", "the sources", ("data",))
RULES = {key: rule for rule in (*TABLE, SOURCES) for key in rule.keys}


@dataclass(frozen=True)
class Change:
    """One thing that would be other than it was.

    Args:
        what: a dotted key, or words for something behind the recipe (a reward file).
        old, new: JSON values; None = not set.
        where: where the new value was written, when it was.
        diff: a unified diff, when both texts are known.
        unfit: why the checkpoint does not fit this very change, of a key whose changes it fits otherwise.
    """

    what: str
    old: Any
    new: Any
    rule: Rule
    where: str = ""
    diff: str = ""
    unfit: str = ""

    @property
    def kind(self) -> Kind:
        return "refused" if self.unfit else self.rule.kind

    @property
    def reason(self) -> str:
        return self.unfit or self.rule.reason

    def record(self) -> dict[str, Any]:
        """As the manifest keeps it."""
        told = {"what": self.what, "old": self.old, "new": self.new, "kind": self.kind, "why": self.reason}
        return told | ({"restarts": list(self.rule.restarts)} if self.rule.restarts else {})


def rule_of(key: Key) -> Rule:
    """The rule of a place in a recipe. Raises: KeyError for a key that is in no row of the table."""
    names = tuple(part for part in key if isinstance(part, str))
    tables = (".".join(names[:n]) for n in range(len(names), 0, -1))
    found = next((RULES[name] for name in tables if name in RULES), None)
    if found is None:
        raise KeyError(f"no rule for {dotted(key)}")
    return found


def compare_recipes(old: Mapping[str, Any], loaded: LoadedRecipe, base: Path, hidden: str = "") -> list[Change]:
    """What a recipe changes against a run's.

    Args:
        old: the values of the run's `resolved.json`; for keys that it lacks see `with_defaults`.
        base: where relative paths of `old` began. A path that leads to the same place is no change.
        hidden: what stands in `old`, or in a part of a text there, for a secret, which cannot be compared.
    """
    old, new = with_defaults(old), loaded.resolved["recipe"]
    before, after = dict(leaves(old)), dict(leaves(new))
    if len(old["data"]) != len(new["data"]):
        was, is_now = ([source["path"] for source in values["data"]] for values in (old, new))
        sources = [Change("data", was, is_now, SOURCES, loaded.where(("data",)))]
        common = range(min(len(old["data"]), len(new["data"])))
    else:
        sources, common = [], range(len(new["data"]))
    return sources + [
        Change(dotted(key), before.get(key), after.get(key), _rule(key, before, after), loaded.where(key))
        for key in _keys(before, after)
        if not (key[0] == "data" and key[1] not in common)
        and not (hidden and hides(before.get(key), after.get(key), hidden))
        and not _same(key, before.get(key), after.get(key), base)
    ]


def _rule(key: Key, before: Mapping[Key, Any], after: Mapping[Key, Any]) -> Rule:
    """Return the rule of a change: a function whose file has moved is known by its source."""
    name = ".".join(part for part in key if isinstance(part, str))
    if name not in ("reward.name", "data.reward"):
        return rule_of(key)
    (_, old), (_, new) = (_split(str(values.get(key))) for values in (before, after))
    return MOVED if old and old == new else rule_of(key)


def _keys(before: Mapping[Key, Any], after: Mapping[Key, Any]) -> Iterator[Key]:
    """Every key of either, once, in the order of the newer."""
    yield from after
    yield from (key for key in before if key not in after)


def _same(key: Key, old: Any, new: Any, base: Path) -> bool:
    """Whether two values mean the same. `{}` is a table of one's own with nothing in it: not set."""
    if old == new or {repr(old), repr(new)} == {"None", "{}"}:
        return True
    name = ".".join(part for part in key if isinstance(part, str))
    if name not in PATH_KEYS or not isinstance(old, str) or not isinstance(new, str):
        return False
    (old_file, old_rest), (new_file, new_rest) = _split(old), _split(new)
    return old_rest == new_rest and (base / old_file).resolve() == Path(new_file).resolve()


def hides(old: Any, new: Any, hidden: str) -> bool:
    """Whether the old value has `hidden` in it, and is the new one but for what that hides."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return old != new and all(a == b or hides(a, b, hidden) for a, b in zip(old, new, strict=True))
    if old == hidden:
        return True
    if not isinstance(old, str) or not isinstance(new, str) or hidden not in old:
        return False
    return re.fullmatch(".*".join(map(re.escape, old.split(hidden))), new, re.DOTALL) is not None


def _split(value: str) -> tuple[str, str]:
    """(file, function) of `file.py:function`; (value, "") of any other."""
    file, _, function = value.rpartition(":") if ".py:" in value else (value, "", "")
    return file, function
