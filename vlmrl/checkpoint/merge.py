"""Conversion of a checkpoint to an ordinary Hugging Face folder, with a proof that it is the same model."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from vlmrl import __version__
from vlmrl.checkpoint.checked_files import check_files
from vlmrl.checkpoint.load import find_base, load_checkpoint_model, put_adapter, saved_lora
from vlmrl.checkpoint.merge_plan import CannotStreamError
from vlmrl.checkpoint.merge_writer import write_streaming
from vlmrl.checkpoint.model_card import model_card
from vlmrl.checkpoint.proof import Proof, ProofRequest, base_model, merge_settings, prove_elsewhere
from vlmrl.errors import CheckpointError
from vlmrl.model.load import DTYPES, load_processor, write_processor
from vlmrl.model.lora import fold_adapter, read_adapter
from vlmrl.model.model_facts import quiet_transformers
from vlmrl.model.safetensors_blocks import parse_size
from vlmrl.model.stored_weights import publishing
from vlmrl.store.checkpoints import ADAPTER, HF, PROOF, read_meta
from vlmrl.store.files import TEMP_PREFIX, TRASH_PREFIX, remove_tree, sync_folder, temp_path, write_json
from vlmrl.store.layout import COMPLETE, MANIFEST, MERGE_RECORD

CARD = "README.md"
MAX_SHARD_SIZE = "5GB"


@dataclass(frozen=True)
class Merged:
    """Result of a merge.

    Args:
        whole: reason why the model was loaded as a whole; None = it was written tensor by tensor.
        leftovers: notes about leftovers of killed merges beside the folder, which were removed.
    """

    folder: Path
    step: int
    parameters: int
    bytes: int
    proof: Proof
    whole: str | None = None
    leftovers: tuple[str, ...] = ()

    @property
    def logp_gap(self) -> float | None:
        """Largest difference of saved and reloaded log-probs, in nats; None = not compared."""
        return self.proof.logp_gap


def merge(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None = None,
    force: bool = False,
    adapter: bool = False,
    base: str | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    skip_proof: bool = False,
    name: str | None = None,
    own_code: bool = False,
) -> Merged:
    """Write the checkpoint as a Hugging Face folder: weights, config, generation config, processor, chat template.

    An adapter is merged into its base model's weights, or kept as a PEFT folder. Weights are read and written tensor by
    tensor, so memory does not grow with the model. The result is first written to a folder beside `out` and loaded
    again in a second process. If its log-probs equal those that were saved with the checkpoint, it is renamed to `out`.

    Args:
        dtype: dtype of the written weights; default: the dtype in which they were trained.
        force: replace an existing folder.
        adapter: write the adapter as a PEFT folder instead of merging it.
        base: present folder of the adapter's base model, if it was moved.
        max_shard_size: maximum size of a weight file, such as 5GB or 500MB; a larger tensor gets a file of its own.
        skip_proof: do not load the result again; this is recorded in the folder's merge.json.
        name: repository to which the folder will be uploaded.
        own_code: whether code in the folders of the checkpoint and its base model may be run.
    Raises: CheckpointError if the checkpoint is damaged, `out` exists, or the reloaded model differs.
    """
    shard_bytes = parse_size(max_shard_size)
    notes = remove_leftovers(out)
    if out.exists() and not force:
        message = "; ".join([f"{out} exists", *notes])
        raise CheckpointError(message, hint="choose another --out, or --force to replace it")
    meta = read_meta(checkpoint)
    _check_options(checkpoint, dtype, adapter, base)
    for part in (HF, PROOF):
        check_files(checkpoint, part)
    whole = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _writing(out, checkpoint.parent.parent) as temp:
            if adapter:
                parameters = _write_adapter(checkpoint, temp)
            else:
                parameters, whole = _write_merged(checkpoint, temp, dtype, base, shard_bytes, own_code)
            with quiet_transformers():
                write_processor(load_processor(merge_settings(checkpoint, own_code)), temp)
            request = ProofRequest(str(checkpoint), str(temp), dtype or meta["dtype"], adapter, base, own_code)
            proof = Proof(None, skipped="--skip-proof") if skip_proof else prove_elsewhere(request)
            write_json(temp / MERGE_RECORD, _record(checkpoint, request, proof, whole))
            # A model card that is uploaded must not name a folder of this machine.
            where = None if name is not None or not adapter else _base_folder(checkpoint, base)
            card = model_card(checkpoint, proof, adapter=adapter, name=name or str(out), base_path=where)
            (temp / CARD).write_text(card, "utf-8")
            _publish(temp, out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the merged model could not be written: {error}",
            where=str(out),
            hint="free disk space, or choose another --out; nothing was written",
        ) from error
    size = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    return Merged(out, meta["step"], parameters, size, proof, whole, tuple(notes))


def _base_folder(checkpoint: Path, base: str | None) -> str | None:
    """Return the folder or hub name from which transformers can load the base; None if it is a run's checkpoint."""
    place = find_base(checkpoint, base)
    return None if isinstance(place, Path) else place


def _record(checkpoint: Path, request: ProofRequest, proof: Proof, whole: str | None) -> dict[str, Any]:
    """Return the content of merge.json. It has no path, host or time, so the same checkpoint gives the same folder."""
    return {
        "schema": 1,
        "vlmrl": __version__,
        "dtype": request.dtype,
        "run": checkpoint.absolute().parent.parent.name,
        "checkpoint": checkpoint.name,
        "meta_sha256": (checkpoint / COMPLETE).read_text("utf-8").strip(),
        "adapter": "kept" if request.adapter else "folded" if saved_lora(checkpoint) else None,
        "loaded_whole": whole,
        "proof": asdict(proof),
    }


def _check_options(checkpoint: Path, dtype: str | None, adapter: bool, base: str | None) -> None:
    if (adapter or base) and saved_lora(checkpoint) is None:
        option = "--adapter" if adapter else "--base"
        raise CheckpointError(
            "this checkpoint has no adapter: it holds whole weights", where=str(checkpoint), hint=f"leave {option} out"
        )
    if adapter and dtype is not None:
        raise CheckpointError(
            "an adapter is kept as it was trained, so --dtype has no meaning with --adapter",
            hint="leave one of the two out",
        )


def _write_merged(
    checkpoint: Path, folder: Path, dtype: str | None, base: str | None, shard_bytes: int, own_code: bool
) -> tuple[int, str | None]:
    """Write the whole model, with the adapter merged if there is one.

    Returns: (number of parameters, reason why it was loaded as a whole; None = it was written tensor by tensor).
    """
    try:
        return write_streaming(checkpoint, folder, dtype, base, shard_bytes, own_code), None
    except CannotStreamError as reason:
        text = str(reason)
    settings = merge_settings(checkpoint, own_code)
    if saved_lora(checkpoint) is None:
        model = load_checkpoint_model(checkpoint, settings)
    else:
        model = fold_adapter(put_adapter(base_model(checkpoint, base, own_code)[0], checkpoint, settings))
    with quiet_transformers(), publishing(model):
        (model if dtype is None else model.to(DTYPES[dtype])).save_pretrained(folder, max_shard_size=shard_bytes)
    return sum(p.numel() for p in model.parameters()), text


def _write_adapter(checkpoint: Path, folder: Path) -> int:
    """Copy the adapter's own files. Return its number of parameters."""
    for name in check_files(checkpoint, ADAPTER):
        shutil.copyfile(checkpoint / name, folder / Path(name).name)
    return sum(t.numel() for t in read_adapter(folder).values())


@contextmanager
def _writing(out: Path, run_dir: Path) -> Iterator[Path]:
    """Context manager: yield a folder beside `out` to write into.

    It holds a lock on the folder, which the system releases when this process ends.
    """
    temp = temp_path(out)
    temp.mkdir()
    lock = os.open(temp, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield temp
    finally:
        if temp.exists():
            shutil.rmtree(temp, ignore_errors=True)
        if run_dir == out.parent and not (run_dir / MANIFEST).exists():
            with suppress(OSError):  # the run was removed, and a library made its folder again
                run_dir.rmdir()
        os.close(lock)


def _publish(temp: Path, out: Path) -> None:
    """Rename the finished folder to its final name, and then delete the folder that it replaces, if there is one."""
    for path in (*temp.rglob("*"), temp):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    old = temp.with_name(TRASH_PREFIX + temp.name.removeprefix(TEMP_PREFIX))
    if out.exists():
        os.replace(out, old)
    os.replace(temp, out)
    sync_folder(out.parent)
    if old.exists():
        remove_tree(old)


def remove_leftovers(out: Path) -> list[str]:
    """Remove the temporary folders that killed merges left beside `out`, and return notes about them.

    The folder of a merge that is still running is not removed.
    """
    if not out.parent.is_dir():
        return []
    notes = []
    prefixes = "|".join(map(re.escape, (TEMP_PREFIX, TRASH_PREFIX)))
    pattern = re.compile(rf"(?:{prefixes}){re.escape(out.name)}-[0-9]+-[0-9a-f]{{6}}")
    for path in sorted(p for p in out.parent.iterdir() if pattern.fullmatch(p.name) and p.is_dir()):
        lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            notes.append(f"an interrupted merge had left {path.name}; it was removed")
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
    return notes
