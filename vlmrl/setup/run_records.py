"""New run folder for a checked recipe; records of data, rewards and prompts, compared with the present ones."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from vlmrl.key_facts import OnResume
from vlmrl.recipe.auto_values import require_filled
from vlmrl.recipe.changes import Change, hides
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.tables import ENVIRONMENT
from vlmrl.redaction.redact import HIDDEN, redact_text, redact_value
from vlmrl.rewards import reward_record
from vlmrl.rewards.base import NO_REWARD
from vlmrl.rewards.identity import RewardIdentity, changed_files, identity_of, same_code, single_records
from vlmrl.store.checkpoints import sha256_of
from vlmrl.store.kept_recipe import Texts, kept_text
from vlmrl.store.provenance import usable_threads
from vlmrl.store.runs import Run, create_run
from vlmrl.tasks.prompt import same_prompt
from vlmrl.tasks.source import Source


class Records(TypedDict):
    """Entries of a manifest for the sources of a recipe."""

    datasets: list[dict[str, Any]]
    rewards: list[dict[str, Any]]
    prompts: list[dict[str, Any]]


VALIDATION_SUFFIX = " (validation)"
"""Suffix of the name of a dataset record whose rows are from a validation file."""
ROWS = OnResume("asked", "the rows themselves", ("best",))
REWARD = OnResume("asked", "what earns a reward", ("best",))
TASK = OnResume("asked", "what is asked and measured", ("best",))
PROMPT = OnResume("asked", "what the model is asked", ("best",))


def records_of(sources: Sequence[Source], validation: Sequence[Source] = ()) -> Records:
    """Return the manifest's `datasets`, `rewards` and `prompts`, one mapping per source each.

    Validation rows from a separate file have a dataset record of their own.
    """
    trained = {s.dataset.path for s in sources}
    scored = [s for s in sources if s.reward is not NO_REWARD]
    apart = [s for s in validation if s.dataset.path not in trained]
    return {
        "datasets": [
            *(dataset_record(s) for s in sources),
            *(dataset_record(s, s.name + VALIDATION_SUFFIX) for s in apart),
        ],
        "rewards": [{"source": s.name, **reward_record(s.reward, s.weights)} for s in scored],
        "prompts": [s.prompt_record for s in sources],
    }


def dataset_record(source: Source, name: str | None = None) -> dict[str, Any]:
    """Return the manifest's record of a source's rows, under `name` (default: the source's)."""
    return {
        "name": name or source.name,
        "path": source.dataset.path,
        "split": source.split,
        "task": source.task.name,
        "variant": source.task.variant,
        "rows": len(source.rows),
        "fingerprint": source.dataset.fingerprint,
        **({"task_sha256": source.task.own.sha256} if source.task.own else {}),
        **({"demonstrations_sha256": sha256_of(file)} if (file := Path(source.demonstrations)).is_file() else {}),
    }


NOT_IN_RECORD = {"name", "args", "workers", "memory_mb"}
"""Keys of `[environment]` on which no response depends, or that the record of an environment has."""


LATER_KEYS = ("repeats", "files")
"""Keys that the record of an environment in an earlier run lacks."""


def environment_record(source: Source) -> dict[str, Any]:
    """Return all of an environment that responses depend on: code, tools and limits; {} without an environment."""
    if source.environment is None:
        return {}
    record = {key: value for key, value in source.environment_record.items() if key not in LATER_KEYS or value}
    return {**record, "limits": source.environment_settings.model_dump(exclude=NOT_IN_RECORD)}


def texts_of(sources: Sequence[Source]) -> Texts:
    """Return (kind, hash) -> text of the sources' task files, reward files and prompt templates."""
    tasks = {("task", s.task.own.sha256): s.task.own.text for s in sources if s.task.own}
    singles = [single for source in sources for single in source.reward.singles]
    rewards = {("reward", single.source_sha256): single.user.source for single in singles if single.user}
    own = {("environment", s.environment.user.sha256): s.environment.user.code for s in sources if s.environment}
    return tasks | rewards | own | {("prompt", s.prompt_sha256): s.template for s in sources if s.template}


def content_changes(run: Run, now: Records, texts: Texts, recipe: Sequence[Change] = ()) -> list[Change]:
    """Return the changes of datasets, rewards and prompts since the manifest of a run was written.

    Only sources that are in both the old and the present records are compared.

    Args:
        run: the run; its manifest has the old records.
        now: the present records.
        texts: present texts, from `texts_of`, for the diffs.
        recipe: changes of the recipe. A change of a reward's arguments that is among them is not reported again.
    """
    manifest, changes = run.manifest, []
    # There is one reward per source. Dataset records of validation files stand after those of the sources.
    before, after = len(manifest.rewards), len(now["rewards"])
    trained = _pairs(manifest.datasets[:before], now["datasets"][:after], "name")
    for old, new in trained + _pairs(manifest.datasets[before:], now["datasets"][after:], "name"):
        if old.get("fingerprint") != new["fingerprint"]:
            changes.append(Change(f"rows of {new['name']}", old, new, ROWS))
        shown = [record.get("demonstrations_sha256") for record in (old, new)]
        if None not in shown and shown[0] != shown[1]:
            changes.append(Change(f"demonstrations of {new['name']}", shown[0], shown[1], ROWS))
        hashes = {"sha256": old.get("task_sha256")}, {"sha256": new.get("task_sha256")}
        if hashes[0] != hashes[1] and not _same_code(run, "task", new["task"], *hashes, texts):
            name = f"task {new['task']}"
            diff = _diff(run, "task", name, *hashes, texts)
            changes.append(Change(name, hashes[0]["sha256"], hashes[1]["sha256"], TASK, diff=diff))
    recipe_says = any(c.kind != "free" and c.what.startswith(("reward.", "rewards.", "data")) for c in recipe)
    for old, new in _pairs(manifest.rewards, now["rewards"], "source"):
        if change := _reward_change(run, old, new, texts, recipe_says):
            changes.append(change)
    for old, new in _pairs(manifest.prompts, now["prompts"], "source"):
        if not same_prompt(old, new):
            name = f"prompt of {new['source']}"
            diff = _diff(run, "prompt", name, old, new, texts)
            changes.append(Change(name, old.get("sha256"), new["sha256"], PROMPT, diff=diff))
        if change := _environment_change(run, old, new, texts):
            changes.append(change)
    distinct = {change.what: change for change in changes}  # a reward of several sources is reported once
    return _each_diff_once(list(distinct.values()))


def _each_diff_once(changes: Sequence[Change]) -> list[Change]:
    """Return the changes with each diff once: if a file is task and reward, only the first change keeps the diff."""
    shown: set[tuple[Any, Any]] = set()
    result = []
    for change in changes:
        pair = (change.old, change.new)
        result.append(replace(change, diff="") if change.diff and pair in shown else change)
        if change.diff:
            shown.add(pair)
    return result


def changed_since(run: Run, sources: Sequence[Source]) -> list[str]:
    """Return the names of the tasks, rewards and prompts of these sources that have changed since the run was made."""
    changes = content_changes(run, records_of(sources), texts_of(sources))
    return [change.what for change in changes if change.rule is not ROWS]


def _environment_change(run: Run, old: Mapping[str, Any], new: Mapping[str, Any], texts: Texts) -> Change | None:
    """Return the change of a source's environment: its code, its tools or arguments; None = it is the same.

    Its limits are keys of the recipe, which are compared as such.
    """
    before, after = (redact_value(dict(record.get("environment") or {})) for record in (old, new))
    after = {key: value for key, value in after.items() if key in before or key not in LATER_KEYS}
    if before == after or not (before and after):  # the recipe says that there is one now, or none
        return None
    name = f"environment of {new['source']}"
    if before.get("sha256") == after["sha256"]:
        keys = [key for key in before | after if before.get(key) != after.get(key)]
        words = changed_files(before, after)
        if "contents" in keys:
            words = [*words, f"the passages of {after['args'].get('corpus', 'it')} have changed"]
        name = f"{name} ({', '.join(words)})" if words else name
        pair = ({key: of.get(key) for key in keys} for of in (before, after))
        return Change(name, *_only_differing(*pair), ENVIRONMENT)
    diff = _diff(run, "environment", name, before, after, texts)
    return Change(name, before.get("sha256"), after["sha256"], ENVIRONMENT, diff=diff)


def _reward_change(
    run: Run, old: Mapping[str, Any], new: Mapping[str, Any], texts: Texts, recipe_says: bool
) -> Change | None:
    """Return the change of a source's reward: its version, source code or arguments; None = the reward is the same."""
    before = identity_of(_with_same_code(run, _without_free(old, new), new, texts))
    after = _with_hidden_args(before, identity_of(redact_value(dict(new))))
    name = f"reward {new['name']}"
    if before == after or (recipe_says and before.without_args() == after.without_args()):
        if not (words := changed_files(old, new)):
            return None
        files = [
            [(one.get("files") or {}).get(word) for one in single_records(of) for word in words] for of in (old, new)
        ]
        was, now = (", ".join(str(sha256)[:12] for sha256 in of if sha256) for of in files)
        return Change(f"{name} ({', '.join(words)})", was, now, REWARD)
    if after.members:
        pairs = zip(single_records(old), single_records(new), strict=False)
        diffs = [_diff(run, "reward", f"reward {b['name']}", a, b, texts) for a, b in pairs if "sha256" in b and a != b]
        return Change(name, before.beside(after), after.beside(before), REWARD, diff="\n".join(filter(None, diffs)))
    if old.get("name") == new["name"] and "sha256" in new and before.sha256 != after.sha256:
        diff = _diff(run, "reward", name, old, new, texts)
        return Change(name, old.get("sha256"), new["sha256"], REWARD, diff=diff)
    return Change(name, before.beside(after), after.beside(before), REWARD)


def _singles(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]] | None:
    """Return pairs of the single rewards of two records, [] if their numbers differ; None if the old one is single."""
    olds, news = single_records(old), single_records(new)
    return None if olds == [old] else list(zip(olds, news, strict=True)) if len(olds) == len(news) else []


def _without_free(old: Mapping[str, Any], new: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a record without the arguments that change no score, as the new record says: earlier ones had them all."""
    if (pairs := _singles(old, new)) is not None:
        return {**old, "rewards": [_without_free(*pair) for pair in pairs] or single_records(old)}
    args, free = old.get("args"), set(new.get("free_args") or {}) - set(new.get("args") or {})
    return {**old, "args": {k: v for k, v in args.items() if k not in free}} if isinstance(args, Mapping) else old


def _with_same_code(run: Run, old: Mapping[str, Any], new: Mapping[str, Any], texts: Texts) -> Mapping[str, Any]:
    """Return a record with the new hash of each source file in which nothing changed that its reward reaches."""
    if (pairs := _singles(old, new)) is not None:
        return {**old, "rewards": [_with_same_code(run, *pair, texts) for pair in pairs] or single_records(old)}
    name = str(new.get("name"))
    compared = old.get("name") == name and "sha256" in old and "sha256" in new
    return {**old, "sha256": new["sha256"]} if compared and _same_code(run, "reward", name, old, new, texts) else old


def _same_code(run: Run, kind: str, name: str, old: Mapping[str, Any], new: Mapping[str, Any], texts: Texts) -> bool:
    """Return whether the function `file.py:function` has the same code in its stored and its present text."""
    before, after = kept_text(run.dir, kind, str(old.get("sha256"))), texts.get((kind, str(new.get("sha256"))))
    if before is None or after is None or HIDDEN in before:  # a value that is hidden may have changed
        return False
    return same_code(before, after, name.rpartition(":")[2])


def _with_hidden_args(before: RewardIdentity, after: RewardIdentity) -> RewardIdentity:
    """Return the new reward with the old value of each argument that differs only in that a secret is hidden in it."""
    members = after.members
    if [m.label for m in before.members] == [m.label for m in members]:
        pairs = zip(before.members, members, strict=True)
        members = tuple(replace(new, reward=_with_hidden_args(old.reward, new.reward)) for old, new in pairs)
    pairs_of_args = ((key, value, after.args[key]) for key, value in before.args.items() if key in after.args)
    unchanged = {key: old for key, old, new in pairs_of_args if hides(_text(old), _text(new), HIDDEN)}
    return replace(after, args={**after.args, **unchanged}, members=members)


def _only_differing(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, str]:
    """Return two records as texts, without the equal fields of the tables in them."""
    for key, table in new.items():
        if isinstance(table, dict) and isinstance(other := old[key], dict):
            names = [name for name in {**other, **table} if other.get(name) != table.get(name)]
            old[key], new[key] = ({n: one[n] for n in names if n in one} for one in (other, table))
    return _text(old), _text(new)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _pairs(
    old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], key: str
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return pairs (old, new) of records: matched by position if both lists have equal lengths, else by name.

    The position has priority because the name of a table may change when the table is moved.
    """
    if len(old) == len(new):
        return list(zip(old, new, strict=True))
    by_name = {str(record.get(key)): record for record in old}
    return [(by_name[record[key]], record) for record in new if record[key] in by_name]


def _diff(run: Run, kind: str, name: str, old: Mapping[str, Any], new: Mapping[str, Any], texts: Texts) -> str:
    """Return a unified diff of the stored and the present text, with secrets hidden; "" if one text is not known."""
    before, after = kept_text(run.dir, kind, str(old.get("sha256"))), texts.get((kind, new["sha256"]))
    if before is None or after is None:
        return ""
    a, b = redact_text(before).splitlines(), redact_text(after).splitlines()
    return "\n".join(difflib.unified_diff(a, b, f"{name} before", f"{name} now", lineterm="", n=2))


@dataclass(frozen=True)
class Labels:
    """Labels by which a person tells runs apart."""

    name: str | None = None
    tags: tuple[str, ...] = ()
    note: str = ""


def start_run(loaded: LoadedRecipe, root: Path, argv: Sequence[str], labels: Labels, *, kind: str | None = None) -> Run:
    """Create a run folder for this recipe, locked by this process. Its parent is the run of the model's checkpoint.

    Args:
        kind: kind of the run, if it differs from the recipe's kind (for a trial); None = the recipe's kind.
    """
    from vlmrl.setup.model_origin import find_model
    from vlmrl.setup.sources import open_sources

    recipe = loaded.recipe
    require_filled(recipe)
    sources, validation = open_sources(recipe)
    origin = find_model(recipe.model.path, root)
    return create_run(
        root,
        kind=kind or recipe.kind,
        recipe_name=loaded.path.stem,
        recipe_text=loaded.text,
        resolved=loaded.resolved,
        argv=argv,
        seeds={"run": recipe.train.seed},
        name=labels.name,
        tags=labels.tags,
        note=labels.note,
        parent=origin.parent,
        threads=usable_threads(),
        texts=texts_of(sources),
        **records_of(sources, validation),
    )
