"""Recorded facts about a run: its manifest, and the ids of its remote loggers. Both files are written atomically."""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from vlmrl.errors import StoreError, shortened
from vlmrl.redaction.redact import excerpt, redact_argv, redact_value
from vlmrl.store import layout
from vlmrl.store.files import folder_guard, write_json
from vlmrl.store.layout import now
from vlmrl.store.lock import this_process
from vlmrl.store.metrics import encode
from vlmrl.untrusted import parse_json, read_regular

SCHEMA = 1
MAX_ERROR_CHARS = 2000
SEAL = "crc32"
"""Key of the checksum of all other values of a manifest, which `vlmrl runs verify` compares."""

Status = Literal["running", "done", "failed", "interrupted", "killed"]
"""Status of a run. "killed" is never stored: it means that "running" is stored, but the owner is dead."""
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class Attempt:
    """One start of a run, by one process or several. The first has number 1; every `--resume` adds one.

    Args:
        from_step: step at which the attempt began: 0, or the step S of the checkpoint that it loaded. It first samples
            with policy version S, so its first rollouts and its first `train` line have step S.
        from_checkpoint: path of that checkpoint relative to the run; None for the first attempt of a new run.
        end: time of its end; None while it runs, or if it was killed.
        changes: differences from the attempt before (for a fork, from its parent): JSON objects with `what`, `old`,
            `new`, `kind` (free, asked, refused), `why` and possibly `restarts` (recipe/changes.py).
        accepted: whether the user gave --accept-changes.
        processes: number of processes that train together; `host` and `pid` belong to the one that writes.
    """

    number: int
    start: str
    host: str
    pid: int
    from_step: int = 0
    from_checkpoint: str | None = None
    end: str | None = None
    status: Status = "running"
    argv: tuple[str, ...] = ()
    changes: tuple[Mapping[str, Any], ...] = ()
    accepted: bool = False
    processes: int = 1

    @property
    def changes_text(self) -> str:
        """Changes of this attempt in one line; empty if there are none."""
        texts = (f"{c.get('what')} {short_value(c.get('old'))} -> {short_value(c.get('new'))}" for c in self.changes)
        return "; ".join(texts) + (" (accepted)" if self.accepted and self.changes else "")


@dataclass(frozen=True)
class Best:
    """Best validation so far. `metric` is the value of the recipe's eval.metric."""

    step: int
    metric: str
    value: float


@dataclass(frozen=True)
class Manifest:
    """All recorded facts of a run. Times are ISO 8601 in UTC.

    Args:
        kind: kind of the run, from the command that made it: rl, sft, eval, try, merge ...
        recipe: name of the recipe (its file name without `.toml`).
        labels: texts that every report prints beside the numbers, e.g. "validated on the test split".
        parent: {"run": id, "checkpoint": name} if it started from another run's weights; also "step" if it is a fork,
            which continues the whole checkpoint.
        origin: for a fork, the source of its parent's first weights, in the form of `parent`; {} = not from a run.
        datasets: one mapping per source: name, path, fingerprint, task, split, rows ...
        rewards, prompts: one mapping per source: source, name, sha256.
        recipe_sha256: hash of recipe.toml as written.
        source_sha256: hash of the code of vlmrl itself.
        files: path relative to the run -> sha256, for files that are written once: recipes, code.diff, kept texts. {}
            for runs of versions without this table.
        error: reason for the end if the run failed, one line.
    """

    id: str
    kind: str
    recipe: str
    start: str
    schema: int = SCHEMA
    name: str | None = None
    tags: tuple[str, ...] = ()
    note: str = ""
    status: Status = "running"
    end: str | None = None
    error: str | None = None
    labels: tuple[str, ...] = ()
    best: Best | None = None
    argv: tuple[str, ...] = ()
    cwd: str = ""
    parent: Mapping[str, Any] | None = None
    origin: Mapping[str, Any] | None = None
    seeds: Mapping[str, int] = field(default_factory=dict)
    threads: int | None = None
    datasets: tuple[Mapping[str, Any], ...] = ()
    rewards: tuple[Mapping[str, Any], ...] = ()
    prompts: tuple[Mapping[str, Any], ...] = ()
    recipe_sha256: str = ""
    source_sha256: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    git: Mapping[str, Any] | None = None
    vlmrl: str = ""
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    hardware: Mapping[str, Any] = field(default_factory=dict)
    attempts: tuple[Attempt, ...] = ()

    @property
    def attempt_starts(self) -> dict[int, int]:
        """Map of attempt -> the step at which it began."""
        return {a.number: a.from_step for a in self.attempts}

    @property
    def forked_at(self) -> int | None:
        """Step at which a fork began; None for a run that began at step 0."""
        return None if self.origin is None else self.attempts[0].from_step

    @property
    def first_weights(self) -> Mapping[str, Any] | None:
        """Run and checkpoint of the first weights, in the form of `parent`. A fork has the same ones as its parent."""
        return self.parent if self.origin is None else self.origin or None

    @property
    def parent_text(self) -> str:
        """Description of the parent; "" if there is none."""
        if not self.parent:
            return ""
        run, checkpoint = self.parent.get("run"), self.parent.get("checkpoint")
        return f"forked from {run} at step {self.forked_at}" if self.origin is not None else f"{run} {checkpoint}"

    @property
    def all_datasets(self) -> tuple[Mapping[str, Any], ...]:
        """Current and replaced datasets. Images of older rollouts may belong to a replaced dataset."""
        replaced = (c["old"] for a in self.attempts for c in a.changes if isinstance(c.get("old"), Mapping))
        return (*self.datasets, *(old for old in replaced if "fingerprint" in old))

    def restarts_since(self, step: int) -> set[str]:
        """Return the parts of a checkpoint's state that must start anew, because of changes at `step` or later."""
        later_attempts = (a for a in self.attempts if a.from_step >= step)
        return {name for a in later_attempts for c in a.changes for name in c.get("restarts", ())}


def short_value(value: Any) -> str:
    """Format a value for one line: a dataset as its rows and fingerprint, a hash shortened, None as `not set`."""
    if isinstance(value, Mapping) and "fingerprint" in value:
        return f"{value.get('rows')} rows of {value.get('path')}, fingerprint {str(value['fingerprint'])[:12]}"
    text = "not set" if value is None else str(value)
    return text[:12] if re.fullmatch("[0-9a-f]{64}", text) else text


def new_attempt(
    number: int,
    start: str,
    argv: Sequence[str],
    checkpoint: Path | None = None,
    changes: Sequence[Mapping[str, Any]] = (),
) -> Attempt:
    """Create the record of an attempt by this process. The number of processes comes from torchrun's environment.

    Args:
        checkpoint: the checkpoint from which the attempt continues.
    """
    owner = this_process()
    name = f"{layout.CHECKPOINTS}/{checkpoint.name}" if checkpoint else None
    step = (layout.parse_checkpoint_name(checkpoint.name) if checkpoint else None) or 0
    words = tuple(redact_argv(argv))
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    return Attempt(
        number, start, owner.host, owner.pid, step, name, argv=words, changes=tuple(changes), processes=processes
    )


def read_manifest(run_dir: Path) -> Manifest:
    """Return the manifest of a run folder.

    Raises: StoreError if it is missing, incomplete, not a manifest, or written by a newer vlmrl.
    """
    return _checked(read_raw(run_dir), run_dir / layout.MANIFEST)


@cache
def model_of(kind: Any) -> Any:
    """Return the pydantic model of a dataclass or TypedDict, for `check_record`."""
    from pydantic import TypeAdapter  # at the first use: importing it is slow, and most commands read no run

    return TypeAdapter(kind)


def _checked(value: dict[str, Any], path: Path | str) -> Manifest:
    return check_record(
        model_of(Manifest), value, "the manifest", path, strict=False, hint="restore manifest.json from a copy"
    )


def check_record(
    model: Any, value: Any, what: str, path: Path | str, *, strict: bool = True, hint: str | None = None
) -> Any:
    """Check a record of a run against its pydantic model, and return what the model makes of it.

    Args:
        strict: whether a value of another type is wrong even if it could be converted, such as "5" to 5.
    Raises: StoreError that names the first wrong value.
    """
    from pydantic import ValidationError

    try:
        return model.validate_python(value, strict=strict)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        message = f"{what} has a wrong value at `{shortened(key)}`: {first['msg']}"
        raise StoreError(message, where=str(path), hint=hint) from None


def read_record(path: Path | str, model: Any, what: str, *, hint: str | None = None) -> dict[str, Any]:
    """Return a record of a run as plain JSON, after a check against its pydantic model.

    Raises: StoreError that names the file, when it is missing or damaged.
    """
    try:
        value = parse_json(read_regular(path))
    except (OSError, ValueError) as error:
        raise StoreError(f"{what} cannot be read: {error}", where=str(path), hint=hint) from error
    check_record(model, value, what, path, hint=hint)
    return value


def manifest_fault(run_dir: Path) -> str | None:
    """Return what shows that the manifest was changed by another program; None if nothing does.

    Earlier versions wrote no checksum. They wrote no other keys either, so a checksum whose key was damaged is noticed.
    """
    value = read_raw(run_dir)
    if SEAL not in value and value.keys() <= {f.name for f in fields(Manifest)}:
        return None
    return None if value == _sealed(value) else "the manifest was changed after the run had written it"


def _sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest's values with their checksum."""
    plain = {key: one for key, one in value.items() if key != SEAL}
    return plain | {SEAL: f"{zlib.crc32(json.dumps(plain, sort_keys=True).encode()):08x}"}


def read_raw(run_dir: Path | str) -> dict[str, Any]:
    """Return the manifest as plain JSON. All its values have been checked, so a reader may rely on their types."""
    path = f"{run_dir}/{layout.MANIFEST}"
    try:
        content = read_regular(path)
    except FileNotFoundError:
        raise StoreError("this folder is not a run: it has no manifest.json", where=str(run_dir)) from None
    except OSError as error:
        raise StoreError(f"cannot read the manifest: {error.strerror}", where=path) from error
    try:
        value = parse_json(content)
    except ValueError:
        what = "is empty" if not content.strip() else f"is cut off or damaged ({len(content)} bytes)"
        hint = "metrics, rollouts and checkpoints beside it are still readable; restore manifest.json from a copy"
        raise StoreError(f"manifest.json {what}", where=path, hint=hint) from None
    if not isinstance(value, dict) or not isinstance(value.get("schema"), int):
        raise StoreError("manifest.json is not the manifest of a run", where=path)
    if value["schema"] > SCHEMA:
        made_by = f"vlmrl {value.get('vlmrl', '?')}"
        message = (
            f"this run was written by {made_by} (manifest schema {value['schema']}); this vlmrl reads schema {SCHEMA}"
        )
        raise StoreError(message, where=path, hint="upgrade vlmrl")
    _checked(value, path)
    return value


def write_manifest(run_dir: Path, manifest: Manifest) -> None:
    """Write the manifest atomically, with secrets hidden."""
    write_json(run_dir / layout.MANIFEST, _sealed(redact_value(asdict(manifest))), crash="mid-manifest")


def update_manifest(run_dir: Path, change: Callable[[Manifest], Manifest]) -> Manifest:
    """Read, change and write the manifest, while no other process does so. Return the new manifest."""
    with folder_guard(run_dir):
        manifest = change(read_manifest(run_dir))
        write_manifest(run_dir, manifest)
    return manifest


def edit(
    run_dir: Path,
    *,
    name: str | None = None,
    note: str | None = None,
    add: Sequence[str] = (),
    drop: Sequence[str] = (),
) -> Manifest:
    """Change what the user may set: name ("" removes it), note, tags. A run that is being written can be edited too."""
    for tag in add:
        check_tag(tag)
    if name:
        check_name(name)

    def change(m: Manifest) -> Manifest:
        tags = [t for t in m.tags if t not in drop]
        tags += [t for t in dict.fromkeys(add) if t not in tags]
        new_name = m.name if name is None else name or None
        return replace(m, name=new_name, note=m.note if note is None else note, tags=tuple(tags))

    return update_manifest(run_dir, change)


def record_end(run_dir: Path, status: Status | None, reason: str) -> None:
    """Record in the manifest the end of a run of several processes.

    The process that writes the run may have been killed, or it may know only that another process ended. If the disk
    refuses the write, the text of that process stays.

    Args:
        status: new status if the stored one is "running". "failed" and "interrupted" replace each other, too: the
            writing process is interrupted when another one fails, and may fail because another was interrupted first.
            None = the writing process may be alive, nothing changes.
        reason: reason for the end; "" = the stored error stays.
    """

    def change(m: Manifest) -> Manifest:
        cause = excerpt(reason, MAX_ERROR_CHARS)
        is_consequence = status == "interrupted" and m.status == "failed"
        error = cause or (None if is_consequence else m.error)
        if m.status not in ("running", "failed", "interrupted") or status in (None, m.status):
            return replace(m, error=error)
        last = replace(m.attempts[-1], end=now(), status=status)
        return replace(m, error=error, status=status, end=last.end, attempts=(*m.attempts[:-1], last))

    with contextlib.suppress(StoreError):
        update_manifest(run_dir, change)


def check_name(name: str) -> None:
    """Check that a name is one word on a command line without another meaning there. Raises: StoreError if not."""
    allowed = name.isprintable() and not any(c in name for c in "/\\ ") and not name.startswith(("-", "."))
    if not name or len(name) > 80 or not allowed or name == "last":
        message = f"`{name}` cannot be the name of a run"
        raise StoreError(message, hint="use up to 80 letters, digits, `.`, `_`, `-`, and not `last`")


def check_tag(tag: str) -> None:
    if not tag or len(tag) > 80 or not tag.isprintable() or "," in tag or tag != tag.strip():
        raise StoreError(f"`{tag}` cannot be a tag", hint="use up to 80 printable characters without commas")


LOGGER_IDS_SCHEMA = 1


@cache
def _model() -> Any:
    from pydantic import Field, TypeAdapter, create_model  # at the first use: importing it is slow

    schema: Any = (Literal[1], Field(alias="schema"))
    return TypeAdapter(create_model("Sinks", schema_=schema, sinks=(dict[str, dict[str, Any]], ...)))


def read_remote(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return logger -> the values that its `open` returned; {} for a run without loggers.

    Raises: StoreError if the file is damaged or of a newer schema.
    """
    path = run_dir / layout.SINKS
    return read_record(path, _model(), layout.SINKS, hint=_HINT)["sinks"] if os.path.lexists(path) else {}


def write_remote(run_dir: Path, sink: str, kept: Mapping[str, Any]) -> None:
    """Write the values that a logger's `open` returned. The values of other loggers stay.

    Secrets are hidden. A damaged file is replaced.

    Raises: StoreError if the write fails; TypeError if a value is not JSON.
    """
    try:
        before = read_remote(run_dir)
    except StoreError:
        before = {}
    sinks = {**before, sink: redact_value(encode(kept))}
    write_json(run_dir / layout.SINKS, {"schema": LOGGER_IDS_SCHEMA, "sinks": sinks})


_HINT = "delete it: the loggers then begin new runs"
