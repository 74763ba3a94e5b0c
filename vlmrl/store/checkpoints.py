"""Files of a checkpoint folder: their names, meta.json, and the check against it. No torch, and nothing is unpickled.

checkpoints/step-000010/
  meta.json           schema, step, base model, dtype, what is trained, sampling policy, every file with size and sha256
  model/              weights: torch.distributed.checkpoint in safetensors form, names as in the transformers model;
                      absent under LoRA
  adapter/            under LoRA: adapter_config.json and adapter_model.safetensors as PEFT reads them; frozen weights
                      stay in the base model, which meta.json names with a checksum
  value_head.safetensors
                      weight and bias of the critic's value head, where there is a critic; for a resume, never merged
  optimizer/          moments, in the same form; float32 masters too when the weights are bfloat16
  hf/                 config, generation config, processor and chat template, as `save_pretrained` writes them
  data.json           position in the data, training state (step, best validation, ...)
  rng/torch.safetensors
  proof.safetensors   token log-probs of a few rollouts under exactly these weights, to prove a reload or a merge
  COMPLETE            sha256 of meta.json, written last; without it, resume, eval and merge ignore the folder

This module alone decides which files belong to a checkpoint. Readers refuse a folder with a file that meta.json does
not list, because a reader that loads all shards would load it, too. They also refuse a folder whose name has another
step than its meta.json. The first versions left COMPLETE empty.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from vlmrl.errors import CheckpointError, StoreError
from vlmrl.redaction.redact import excerpt
from vlmrl.store import layout
from vlmrl.store.layout import COMPLETE, META, parse_checkpoint_name
from vlmrl.store.manifest import Manifest, check_record
from vlmrl.untrusted import parse_json, read_regular

SCHEMA = 1
MOST_NAMES = 3
SavedDtype = Literal["float32", "bfloat16"]
ANOTHER = "use another checkpoint of the run; if you delete this folder, --resume takes the one before"


def read_meta(folder: Path) -> dict[str, Any]:
    """Return meta.json of a complete checkpoint.

    Its file table was checked to be well formed, and the folder to hold no other files.

    Raises: CheckpointError if COMPLETE is missing, meta.json is damaged or of another schema, the folder's name has
        another step, or a file is not listed.
    """
    meta = _read_json(folder)
    for fault in _table_faults(folder, meta):
        raise fault
    return meta


def check_files(folder: Path, under: str = "", *, read: bool = True) -> list[str]:
    """Compare the files under `folder/under` with the table in meta.json: names, sizes and sha256.

    Args:
        under: a file or a sub-folder; "" = everything.
        read: whether to compare the sha256 too.
    Returns: the names that were checked, sorted.
    Raises: CheckpointError as `read_meta`, or one that names the first file that is missing or differs.
    """
    table = listed(folder, under)
    if not table:
        raise CheckpointError(
            f"{META} does not list {under or 'any file'}", where=str(folder), hint="use another checkpoint of the run"
        )
    for name, facts in table.items():
        check_file(folder, name, facts, read=read)
    return list(table)


def listed(folder: Path, under: str = "") -> dict[str, dict[str, Any]]:
    """Return the file table of a checkpoint: name -> `file_facts`, sorted by name.

    Args:
        under: only this file or sub-folder; "" = everything.
    Raises: CheckpointError as `read_meta`.
    """
    table = read_meta(folder)["files"]
    return {n: table[n] for n in sorted(table) if n == under or n.startswith(under and f"{under}/")}


def check_file(folder: Path, name: str, facts: Mapping[str, Any], *, read: bool = True) -> None:
    """Check one listed file. Raises: CheckpointError if it is missing, cannot be read, or differs from its entry."""
    path = folder / name
    try:
        there = path.is_file()
        if there and path.stat().st_size == facts["bytes"] and not (read and sha256_of(path) != facts["sha256"]):
            return
        what = "was changed since it was saved" if there else "is missing"
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    raise CheckpointError(f"{name} {what}", where=str(folder), hint=ANOTHER)


def faults(folder: Path, *, read: bool = True) -> Iterator[CheckpointError]:
    """Yield every fault of a checkpoint, for `vlmrl runs verify`.

    Args:
        read: whether to compare the sha256 too.
    """
    try:
        meta = _read_json(folder)
    except CheckpointError as error:
        yield error
        return
    yield from _table_faults(folder, meta)
    for name, facts in sorted(_sound(meta.get("files")).items()):
        try:
            check_file(folder, name, facts, read=read)
        except CheckpointError as error:
            yield error


def file_facts(path: Path) -> dict[str, Any]:
    """Return a file's entry in the table: {"bytes", "sha256"}."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def sha256_of(*paths: Path) -> str:
    """Return the sha256 of a file, or of the content of files in order, as hexadecimal text. It is read in blocks."""
    digest = hashlib.sha256()  # hashlib.file_digest needs Python 3.11
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def hash_line(path: Path) -> bytes:
    """Return a file's line in a table of the program `sha256sum`."""
    return f"{sha256_of(path)}  {path.name}".encode()


def hashes_of(folder: Path, paths: Iterable[Path]) -> dict[str, str]:
    """Return path relative to `folder` -> sha256 of the file."""
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in paths}


def _read_json(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        hint = "was its run moved? name the folder that has it now: --runs DIR"
        raise CheckpointError("there is no such checkpoint", where=str(folder), hint=hint)
    if not (folder / COMPLETE).is_file():
        raise CheckpointError(
            "this checkpoint is not complete: a save was interrupted",
            where=str(folder),
            hint="use an older one; `vlmrl runs show RUN` lists the complete ones",
        )
    try:
        text, expected_sha256 = read_regular(folder / META), read_regular(folder / COMPLETE).decode().strip()
        if expected_sha256 and expected_sha256 != hashlib.sha256(text).hexdigest():
            raise ValueError("it was changed since it was saved")
        meta = parse_json(text)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{META} cannot be read: {error}", where=str(folder), hint=ANOTHER) from error
    if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
        schema = meta.get("schema") if isinstance(meta, dict) else None
        message = f"this checkpoint has schema {schema}; this vlmrl reads schema {SCHEMA}"
        raise CheckpointError(message, where=str(folder))
    try:
        check_record(_model(), meta, META, folder, hint=ANOTHER)
        if meta.get("lora") is not None and meta.get("base") is None:
            raise StoreError(f"{META} names no base model of its adapter", where=str(folder), hint=ANOTHER)
    except StoreError as error:
        raise CheckpointError(error.message, where=error.where, hint=error.hint) from None
    return meta


@cache
def _model() -> Any:
    """Return the model of meta.json: the keys that readers use. `_table_faults` checks the file table."""
    from pydantic import Field, TypeAdapter, create_model  # at the first use: importing it is slow

    text: Any = (str | None, None)
    number: Any = (int | None, None)
    policy: Any = create_model(
        "Policy",
        temperature=(Annotated[float, Field(ge=0, allow_inf_nan=False)], ...),
        banned_ids=(list[Annotated[int, Field(ge=0, lt=1 << 31)]], ...),
    )
    base: Any = create_model("Base", path=(str, ...), revision=text, run=text, step=number, fingerprint=text)
    parts = Literal["vision", "connector", "language", "embeddings"]
    fields: Any = {
        "step": (int, ...),
        "dtype": (SavedDtype, ...),
        "policy": (policy, ...),
        "base": (base | None, None),
        "kind": (str, ""),
        "optimizer_updates": (Annotated[int, Field(ge=0)], 0),
        "lora": (dict[str, Any] | None, None),
        "freeze": (list[parts], []),
        "quantize": (Literal["4bit"] | None, None),
    }
    return TypeAdapter(create_model("Meta", **fields))


def _table_faults(folder: Path, meta: Mapping[str, Any]) -> Iterator[CheckpointError]:
    """Yield the faults of the file table, and files that it or the folder lacks. No file's content is read."""
    where = str(folder)
    named = parse_checkpoint_name(folder.absolute().name)
    if named is not None and meta.get("step") != named:
        message = f"{META} says step {meta.get('step')}, the folder's name says step {named}"
        yield CheckpointError(message, where=where, hint="the folder was renamed or copied: restore its name")
    table = meta.get("files")
    if not isinstance(table, dict) or not table:
        yield CheckpointError(
            f"{META} lists no files, so the files of this checkpoint are not known", where=where, hint=ANOTHER
        )
        return
    wrong = sorted(table.keys() - _sound(table).keys())
    if wrong:
        message = f"{META} has a wrong entry, or one for a file outside of the checkpoint: {wrong[0]}"
        yield CheckpointError(message, where=where, hint=ANOTHER)
    strays = sorted(_names_in(folder) - table.keys() - {META, COMPLETE})
    if strays:
        shown_names = ", ".join(strays[:MOST_NAMES]) + (" ..." if len(strays) > MOST_NAMES else "")
        message = f"{shown_names} does not belong to this checkpoint: {META} does not list it"
        hint = f"take {'it' if len(strays) == 1 else f'these {len(strays)} files'} out of the folder, or {ANOTHER}"
        yield CheckpointError(message, where=where, hint=hint)


def _sound(table: Any) -> dict[str, dict[str, Any]]:
    """Return the valid entries of a file table: they name a file within the folder and have its size and sha256."""
    sound = {}
    for name, facts in table.items() if isinstance(table, dict) else ():
        path = PurePosixPath(name)
        within = path.as_posix() == name and not path.is_absolute() and ".." not in path.parts and "\0" not in name
        if within and isinstance(facts, dict) and type(facts.get("bytes")) is int:
            sound |= {name: facts} if isinstance(facts.get("sha256"), str) else {}
    return sound


def _names_in(folder: Path) -> set[str]:
    """Return the paths of all files in a folder, relative to it. A folder that is a link is searched only once."""
    names: set[str] = set()
    visited: set[tuple[int, int]] = set()
    pending = [""]
    while pending:
        below = pending.pop()
        status = os.stat(folder / below)
        if (status.st_dev, status.st_ino) in visited:
            continue
        visited.add((status.st_dev, status.st_ino))
        with os.scandir(folder / below) as entries:
            for entry in entries:
                (pending.append if entry.is_dir() else names.add)(f"{below}/{entry.name}" if below else entry.name)
    return names


def _step_of(which: str) -> int | None:
    """Return the step that `72` or `step-000072` names; None for another text."""
    return int(which) if which.isascii() and which.isdigit() and len(which) < 10 else parse_checkpoint_name(which)


def split_checkpoint(ref: str, default: str | int) -> tuple[str, str | int]:
    """Split `RUN@STEP`, `RUN@best`, `RUN@last` or `RUN` into the run and `which` of `choose_checkpoint`."""
    run, _, which = ref.rpartition("@")
    return (run, which) if run and (which in ("best", "last") or _step_of(which) is not None) else (ref, default)


AS_ASKED = "as requested"
"""Reason for the choice of a checkpoint when the user named the step or the folder."""


def choose_checkpoint(run_dir: Path, manifest: Manifest, which: str | int = "best") -> tuple[Path, str]:
    """Return (checkpoint, reason for this choice, in words).

    Args:
        which: a step (72, also as text, or "step-000072"), "last", or "best" (the last one if no validation has named a
            best).
    Raises: StoreError if there is no such checkpoint. If the best one is missing, no other is returned in its place.
    """
    checkpoints, best = layout.complete_checkpoints(run_dir), manifest.best
    names = (", ".join(p.name for p in checkpoints) or "none") + left_out_by_pack(run_dir)
    if isinstance(which, str) and which not in ("best", "last"):
        named = _step_of(which)
        if named is None:
            hint = f"best, last or a step; complete ones: {names}"
            raise StoreError(f"`{excerpt(which, 60)}` does not name a checkpoint", where=str(run_dir), hint=hint)
        which = named
    step = best.step if which == "best" and best else which
    exact = layout.checkpoint_dir(run_dir, step) if isinstance(step, int) else None
    if exact in checkpoints:
        why = f"the best by {best.metric} ({best.value:.4g})" if which == "best" and best else AS_ASKED
        return exact, why
    if which == "best" and best and checkpoints:
        raise StoreError(
            f"run {manifest.id} has no checkpoint of its best step, {best.step} ({best.metric} {best.value:.4g})"
            + (": that is the model it started from; later steps were at most as good" if best.step == 0 else ""),
            where=str(run_dir),
            hint=f"name another one: --checkpoint last, or as a model {manifest.id}@last; complete ones: {names}",
        )
    if checkpoints and not isinstance(which, int):
        return checkpoints[-1], "the last; no validation has set a best one" if which == "best" else "the last"
    older = isinstance(which, int) and bool(checkpoints) and checkpoints[-1].name > layout.step_name(which)
    why = "; a run keeps the best one and the newest `checkpoint.keep_last`" if older else ""
    raise StoreError(
        f"run {manifest.id} has no checkpoint {which}", where=str(run_dir), hint=f"complete ones: {names}{why}"
    )


def left_out_by_pack(run_dir: Path) -> str:
    """Return which checkpoints `vlmrl runs pack` left out of this copy of a run, and what to do, for a hint; or ""."""
    try:
        names = parse_json(read_regular(run_dir / layout.PACKED))["left_out"]
        steps = [name for name in names if parse_checkpoint_name(name) is not None]
        lost = [name for name in steps if not (run_dir / layout.CHECKPOINTS / name).is_dir()]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    way = "copy them from the run into checkpoints/, or pack it again with --checkpoints all"
    return f"; `vlmrl runs pack` left out {', '.join(lost)}: {way}" if lost else ""


MODEL, ADAPTER, OPTIMIZER, HF = "model", "adapter", "optimizer", "hf"
DATA = "data.json"
RNG = "rng/torch.safetensors"
VALUE_HEAD = "value_head.safetensors"
PROOF = "proof.safetensors"


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 5GB, 500MB or 2GiB. Raises: CheckpointError for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS.get(match[2].upper(), 0)) if match else 0
    if size <= 0:
        raise CheckpointError(f"`{text}` is not a size", hint="write it as 5GB, 500MB or 2GiB")
    return size


def refuse_existing(out: Path, force: bool, notes: Iterable[str] = ()) -> None:
    """Raise a CheckpointError if the folder to be written exists and is not to be replaced."""
    if out.exists() and not force:
        message = "; ".join([f"{out} exists", *notes])
        raise CheckpointError(message, hint="choose another --out, or --force to replace it")
