"""From a checkpoint to a Hugging Face folder that anything can load, proven to be the same model."""

from __future__ import annotations

import fcntl
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from vlmrl.checkpoint.format import ADAPTER, HF, read_meta
from vlmrl.checkpoint.io import check_files, load_proof
from vlmrl.checkpoint.load import load_base, load_checkpoint_model, put_adapter, saved_lora
from vlmrl.data.batch import PromptTokens, TrainItem, make_row
from vlmrl.errors import CheckpointError
from vlmrl.model.load import DTYPES, load_model, load_processor, prepare_model
from vlmrl.model.lora import fold_adapter, load_peft_folder, read_adapter
from vlmrl.model.policy import Policy
from vlmrl.model.quiet import quiet_transformers
from vlmrl.recipe.schema import Model
from vlmrl.store.files import TEMP_PREFIX, TRASH_PREFIX, remove_tree, sync_folder, temp_path
from vlmrl.types import Segment

TOLERANCE_NATS = {"float32": 1e-4, "bfloat16": 5e-2, "4bit": 1e-1}
"""Largest |log-prob| difference after reload that counts as the same model: rounding of another batch shape (and, from
4 bits, of the kernel that multiplied packed weights)."""


@dataclass(frozen=True)
class Merged:
    """What a merge did. `logp_gap` in nats: largest difference of saved and reloaded log-probs; None = no proof.

    `found`: what killed merges had left beside the folder, in words; it was removed.
    """

    folder: Path
    step: int
    parameters: int
    bytes: int
    logp_gap: float | None
    found: tuple[str, ...] = ()


def merge(
    checkpoint: Path, out: Path, *, dtype: str | None = None, force: bool = False, adapter: bool = False,
    base: str | None = None,
) -> Merged:  # fmt: skip
    """Write the checkpoint as a Hugging Face folder: weights, config, generation config, processor, chat template.

    An adapter is folded into its base model's weights, or kept as a PEFT folder. What was written beside `out` is
    loaded again as anybody would (`AutoModelForImageTextToText`, `PeftModel`), compared with the log-probs that were
    saved with the checkpoint, and only then renamed to `out`.

    Args:
        dtype: of the written weights; default: the dtype they were trained in.      force: replace an existing folder.
        adapter: keep the adapter as it is.      base: where its base model is now, when it is not where it was.
    Raises: CheckpointError when the checkpoint is damaged, `out` exists, or the reloaded model differs.
    """
    found = remove_leftovers(out)
    if out.exists() and not force:
        told = "; ".join([f"{out} exists", *found])
        raise CheckpointError(told, hint="choose another --out, or --force to replace it")
    meta = read_meta(checkpoint)
    _check_options(checkpoint, dtype, adapter, base)
    source = _Source(checkpoint, _settings(checkpoint, meta), base)
    write = _write_adapter if adapter else _write_merged
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _writing(out) as temp:
            parameters = write(source, temp, dtype)
            gap = prove_adapter(source, temp) if adapter else prove(checkpoint, temp, dtype or meta["dtype"])
            compared = (dtype or meta["dtype"], meta.get("quantize") or meta["dtype"])
            limit = max(TOLERANCE_NATS[kind] for kind in compared)
            if gap is not None and not gap <= limit:
                raise CheckpointError(
                    f"the merged model is not the trained one: log-probs differ by {gap:.2g} nats",
                    where=str(checkpoint), hint="nothing was written; this is worth a bug report",
                )  # fmt: skip
            _publish(temp, out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the merged model could not be written: {error}", where=str(out),
            hint="free disk space, or choose another --out; nothing was written",
        ) from error  # fmt: skip
    size = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    return Merged(out, meta["step"], parameters, size, gap, tuple(found))


@dataclass(frozen=True)
class _Source:
    """A checkpoint to merge, how its model is loaded, and where its base is if somebody said so."""

    checkpoint: Path
    settings: Model
    base: str | None

    def base_model(self) -> Any:
        model = load_base(self.checkpoint, self.settings, path=self.base)
        # The adapter was trained on the rounded weights: those, in full width again, are what it belongs to.
        return model if self.settings.quantize is None else model.dequantize()


def _settings(checkpoint: Path, meta: dict[str, Any]) -> Model:
    quantize = meta.get("quantize")
    device = "cpu" if quantize is None else "auto"
    return Model(path=str(checkpoint / HF), dtype=meta["dtype"], device=device, quantize=quantize)


def _check_options(checkpoint: Path, dtype: str | None, adapter: bool, base: str | None) -> None:
    if (adapter or base) and saved_lora(checkpoint) is None:
        option = "--adapter" if adapter else "--base"
        raise CheckpointError("this checkpoint has no adapter: it holds whole weights", where=str(checkpoint),
                              hint=f"leave {option} out")  # fmt: skip
    if adapter and dtype is not None:
        raise CheckpointError("an adapter is kept as it was trained, so --dtype has no meaning with --adapter",
                              hint="leave one of the two out")  # fmt: skip


def _write_merged(source: _Source, folder: Path, dtype: str | None) -> int:
    """The whole model, an adapter folded in. Returns its number of parameters."""
    if saved_lora(source.checkpoint) is None:
        model = load_checkpoint_model(source.checkpoint, source.settings)
    else:
        model = fold_adapter(put_adapter(source.base_model(), source.checkpoint, source.settings))
    with quiet_transformers():
        (model if dtype is None else model.to(DTYPES[dtype])).save_pretrained(folder)
        load_processor(source.settings).save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def _write_adapter(source: _Source, folder: Path, dtype: str | None) -> int:
    """The adapter's own files and the processor. Returns the adapter's number of parameters."""
    check_files(source.checkpoint, ADAPTER)
    for path in (source.checkpoint / ADAPTER).iterdir():
        shutil.copyfile(path, folder / path.name)
    with quiet_transformers():
        load_processor(source.settings).save_pretrained(folder)
    return sum(t.numel() for t in read_adapter(folder).values())


@contextmanager
def _writing(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write into, held by a lock that the system lets go when this process dies."""
    temp = temp_path(out)
    temp.mkdir()
    lock = os.open(temp, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield temp
    finally:
        if temp.exists():
            shutil.rmtree(temp, ignore_errors=True)
        os.close(lock)


def _publish(temp: Path, out: Path) -> None:
    """Give the finished folder its name. One that is replaced is deleted only after that."""
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
    """Remove what killed merges into `out` left beside it; a running one is left alone. Returns it in words."""
    if not out.parent.is_dir():
        return []
    found = []
    prefixes = "|".join(map(re.escape, (TEMP_PREFIX, TRASH_PREFIX)))
    pattern = re.compile(rf"(?:{prefixes}){re.escape(out.name)}-[0-9]+-[0-9a-f]{{6}}")
    for path in sorted(p for p in out.parent.iterdir() if pattern.fullmatch(p.name) and p.is_dir()):
        lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            found.append(f"an interrupted merge had left {path.name}; it was removed")
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
    return found


def prove(checkpoint: Path, folder: Path, dtype: str) -> float | None:
    """Load `folder` as any user would and compare it with the checkpoint's proof.

    Returns: largest |log-prob difference| in nats over the saved rollouts; None when the checkpoint has no proof.
    """
    model = load_model(Model(path=str(folder), dtype="float32" if dtype == "float32" else "bfloat16", device="cpu"))
    return _gap(checkpoint, model)


def prove_adapter(source: _Source, folder: Path) -> float | None:
    """As `prove`, for a PEFT folder: the base model with that adapter on it, through PeftModel."""
    return _gap(source.checkpoint, prepare_model(load_peft_folder(source.base_model(), folder), source.settings))


def _gap(checkpoint: Path, model: Any) -> float | None:
    proof = load_proof(checkpoint)
    if not proof:
        return None
    sampling = read_meta(checkpoint)["policy"]
    policy = Policy(model, temperature=sampling["temperature"], banned_ids=sampling["banned_ids"], shared_prefix=False)
    return proof_gap(policy, proof)


def make_proof(policy: Policy, items: list[TrainItem]) -> dict[str, Tensor]:
    """Token log-probs of a few trajectories under the policy as it is, with all that computing them again needs."""
    proof: dict[str, Tensor] = {"count": torch.tensor(len(items))}
    with torch.no_grad():
        for i, item in enumerate(items):
            ids = [t for s in item.segments for t in s.ids]
            trained = [s.trained for s in item.segments for _ in s.ids]
            proof |= {
                f"{i}.prompt_ids": torch.tensor(item.prompt.ids), f"{i}.kinds": torch.tensor(item.prompt.kinds),
                f"{i}.response_ids": torch.tensor(ids), f"{i}.trained": torch.tensor(trained),
                f"{i}.num_images": torch.tensor(item.prompt.num_images),
                f"{i}.logp": policy(make_row([item], policy.device)).logp.cpu(),
            }  # fmt: skip
            proof |= {f"{i}.image.{k}": v for k, v in item.prompt.images.items()}
    return proof


def proof_gap(policy: Policy, proof: dict[str, Tensor]) -> float:
    """Largest |log-prob difference| between the policy and a proof. Nats; NaN when any log-prob is."""
    worst = 0.0
    with torch.no_grad():
        for i in range(int(proof["count"])):
            images = {k.split(".image.")[1]: v for k, v in proof.items() if k.startswith(f"{i}.image.")}
            prompt = PromptTokens(
                tuple(proof[f"{i}.prompt_ids"].tolist()), tuple(proof[f"{i}.kinds"].tolist()), images,
                int(proof[f"{i}.num_images"]),
            )  # fmt: skip
            pairs = zip(proof[f"{i}.response_ids"].tolist(), proof[f"{i}.trained"].tolist(), strict=True)
            segments = tuple(Segment("assistant", (token,), trained) for token, trained in pairs)
            logp = policy(make_row([TrainItem(prompt, 0, segments, 0)], policy.device)).logp.cpu()
            gap = float((logp - proof[f"{i}.logp"]).abs().max()) if len(logp) else 0.0
            if math.isnan(gap):  # max() would pass it over
                return gap
            worst = max(worst, gap)
    return worst
