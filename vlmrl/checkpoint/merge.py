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

from vlmrl.checkpoint.format import HF, read_meta
from vlmrl.checkpoint.io import check_files, load_proof, load_weights
from vlmrl.data.batch import PromptTokens, TrainItem, make_row
from vlmrl.errors import CheckpointError
from vlmrl.model.load import DTYPES, load_model, load_processor
from vlmrl.model.policy import Policy
from vlmrl.model.quiet import quiet_transformers
from vlmrl.recipe.schema import Model
from vlmrl.store.files import TEMP_PREFIX, TRASH_PREFIX, remove_tree, sync_folder, temp_path
from vlmrl.types import Segment

TOLERANCE_NATS = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest |log-prob| difference after reload that counts as the same model: rounding of another batch shape."""


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


def merge(checkpoint: Path, out: Path, *, dtype: str | None = None, force: bool = False) -> Merged:
    """Write the checkpoint as a Hugging Face folder: weights, config, generation config, processor, chat template.

    The folder is written beside `out`, loaded again through `AutoModelForImageTextToText`, compared with the log-probs
    that were saved with the checkpoint, and only then renamed to `out`.

    Args: dtype: of the written weights; default: the dtype they were trained in. force: replace an existing folder.
    Raises: CheckpointError when the checkpoint is damaged, `out` exists, or the reloaded model differs.
    """
    found = remove_leftovers(out)
    if out.exists() and not force:
        told = "; ".join([f"{out} exists", *found])
        raise CheckpointError(told, hint="choose another --out, or --force to replace it")
    meta = read_meta(checkpoint)
    settings = Model(path=str(checkpoint / HF), dtype=meta["dtype"], device="cpu")
    model = load_checkpoint_model(checkpoint, settings)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _writing(out) as temp:
            with quiet_transformers():
                (model if dtype is None else model.to(DTYPES[dtype])).save_pretrained(temp)
                load_processor(settings).save_pretrained(temp)
            gap = prove(checkpoint, temp, dtype or meta["dtype"])
            limit = max(TOLERANCE_NATS[dtype or meta["dtype"]], TOLERANCE_NATS[meta["dtype"]])
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
    return Merged(out, meta["step"], sum(p.numel() for p in model.parameters()), size, gap, tuple(found))


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


def load_checkpoint_model(checkpoint: Path, settings: Model) -> Any:
    """The model of a checkpoint: architecture from its `hf` folder, weights from its `model` folder.

    Args: settings: dtype, device and `trust_remote_code`; its path is not used.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

    hf = checkpoint / HF
    check_files(checkpoint, HF)
    with quiet_transformers():
        trust = settings.trust_remote_code
        config = AutoConfig.from_pretrained(hf, trust_remote_code=trust)
        model = AutoModelForImageTextToText.from_config(config, dtype=DTYPES[settings.dtype], trust_remote_code=trust)
        if (hf / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(hf)
    load_weights(checkpoint, model)
    model.tie_weights()
    return model


def prove(checkpoint: Path, folder: Path, dtype: str) -> float | None:
    """Load `folder` as any user would and compare it with the checkpoint's proof.

    Returns: largest |log-prob difference| in nats over the saved rollouts; None when the checkpoint has no proof.
    """
    proof = load_proof(checkpoint)
    if not proof:
        return None
    model = load_model(Model(path=str(folder), dtype="float32" if dtype == "float32" else "bfloat16", device="cpu"))
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
