"""Proof of a merge: token log-probs saved with the checkpoint, computed again from the written folder.

The second computation runs in a separate process (`python -m vlmrl.checkpoint.proof REQUEST`), which gets only the
written folder and loads it in the standard way (`AutoModelForImageTextToText`, `PeftModel`). transformers maps the
weight files on a CPU, so a model larger than the memory is paged in layer by layer.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmrl.checkpoint.io import load_proof
from vlmrl.checkpoint.load import load_base
from vlmrl.checkpoint.merge_weights import CannotStreamError, make_plan
from vlmrl.errors import CheckpointError, VlmrlError
from vlmrl.model.load import DTYPES, load_model, prepare_model
from vlmrl.model.lora import load_peft_folder
from vlmrl.model.model_facts import usable_memory
from vlmrl.model.packing import PromptTokens, TrainItem, make_row
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Model
from vlmrl.redaction.redact import excerpt
from vlmrl.store.checkpoints import HF, read_meta
from vlmrl.types import Segment

TOLERANCE_NATS = {"float32": 1e-4, "bfloat16": 5e-2, "4bit": 1e-1}
"""Largest log-prob difference in nats (absolute) at which a reloaded model is considered the same.

It allows for different rounding in another batch shape (and, for 4 bits, in the kernel that multiplies packed weights).
"""
TAIL_CHARS = 1500
"""Number of characters from the end of the process's stderr that an error message quotes."""


@dataclass(frozen=True)
class Proof:
    """Result of a comparison.

    Args:
        logp_gap: largest difference of log-probs in nats; None = not compared, for the reason in `skipped`.
        limit: largest allowed difference, in nats.
    """

    logp_gap: float | None
    tokens: int = 0
    rollouts: int = 0
    limit: float | None = None
    skipped: str | None = None


@dataclass(frozen=True)
class ProofRequest:
    """Request to prove that a written folder holds the model of a checkpoint.

    Args:
        dtype: dtype of the written weights.
        adapter: whether the folder is a PEFT folder, which is loaded with its base model.
        base: present folder of this base model, if it was moved.
        own_code: whether code in the folders of the models may be run.
    """

    checkpoint: str
    folder: str
    dtype: str
    adapter: bool = False
    base: str | None = None
    own_code: bool = False


def prove_elsewhere(request: ProofRequest) -> Proof:
    """Run `prove` in a second process.

    Raises: CheckpointError if the log-probs differ by more than the limit, the folder cannot be loaded, or the process
        was killed.
    """
    command = [sys.executable, "-m", "vlmrl.checkpoint.proof", json.dumps(asdict(request))]
    result = subprocess.run(command, capture_output=True, text=True)
    lines = result.stdout.splitlines()
    if result.returncode < 0:
        raise CheckpointError(
            f"the process that proves the merge was killed by signal {-result.returncode}",
            where=request.folder,
            hint="most likely it ran out of memory; --skip-proof writes the folder unproven, and records that in it",
        )
    if result.returncode or not lines:
        raise CheckpointError(
            f"the process that proves the merge failed: {excerpt(result.stderr.strip(), TAIL_CHARS, end=True)}",
            where=request.folder,
            hint="nothing was written; please report this as a bug",
        )
    answer = json.loads(lines[-1])
    if "error" in answer:
        raise CheckpointError(**answer["error"])
    return check_gap(request, Proof(**answer))


def check_gap(request: ProofRequest, proof: Proof) -> Proof:
    """Return the proof with its limit.

    Raises: CheckpointError when the difference is above the limit, or not a number.
    """
    meta = read_meta(Path(request.checkpoint))
    kinds = (request.dtype, meta["dtype"], meta.get("quantize") or meta["dtype"])
    limit = max(TOLERANCE_NATS[kind] for kind in kinds)
    if proof.logp_gap is not None and not proof.logp_gap <= limit:
        raise CheckpointError(
            f"the merged model is not the trained one: log-probs differ by {proof.logp_gap:.2g} nats (limit {limit:g})",
            where=request.checkpoint,
            hint="nothing was written; please report this as a bug",
        )
    return Proof(proof.logp_gap, proof.tokens, proof.rollouts, None if proof.logp_gap is None else limit, proof.skipped)


def prove(request: ProofRequest) -> Proof:
    """Load the written folder and compare its log-probs with the saved ones, in this process."""
    checkpoint, folder = Path(request.checkpoint), Path(request.folder)
    proof = load_proof(checkpoint)
    if not proof:
        return Proof(None, skipped="the checkpoint was saved before any rollout: it holds no log-probs to compare")
    if not request.adapter and (misfit := _does_not_fit(folder, request)):
        return Proof(None, skipped=misfit)
    model = _adapted(request) if request.adapter else load_model(_settings(folder, request))
    sampling = read_meta(checkpoint)["policy"]
    policy = Policy(model, temperature=sampling["temperature"], banned_ids=sampling["banned_ids"], shared_prefix=False)
    tokens = sum(int(v.sum()) for k, v in proof.items() if k.endswith(".trained"))
    return Proof(proof_gap(policy, proof), tokens, int(proof["count"]))


def _settings(folder: Path, request: ProofRequest) -> Model:
    dtype = "float32" if request.dtype == "float32" else "bfloat16"
    return Model(path=str(folder), dtype=dtype, device="cpu", trust_remote_code=request.own_code)


def _adapted(request: ProofRequest) -> Any:
    model, settings = base_model(Path(request.checkpoint), request.base, request.own_code)
    return prepare_model(load_peft_folder(model, Path(request.folder)), settings)


def base_model(checkpoint: Path, base: str | None, own_code: bool) -> tuple[Any, Model]:
    """Return (base model of a checkpoint's adapter in full precision, the settings it was loaded with)."""
    settings = merge_settings(checkpoint, own_code)
    model = load_base(checkpoint, settings, path=base)
    # The adapter was trained on quantized weights. So it fits the dequantized values, not the original ones.
    return (model if settings.quantize is None else model.dequantize()), settings


def merge_settings(checkpoint: Path, own_code: bool) -> Model:
    """Return the settings for loading a checkpoint's model for a merge.

    They are those of the training, except that the device is the CPU unless the model was in 4 bits.
    """
    meta = read_meta(checkpoint)
    quantize = meta.get("quantize")
    device = "cpu" if quantize is None else "auto"
    return Model(
        path=str(checkpoint / HF),
        dtype=meta["dtype"],
        device=device,
        quantize=quantize,
        trust_remote_code=own_code,
    )


def _does_not_fit(folder: Path, request: ProofRequest) -> str | None:
    """Return the reason why the model cannot be loaded on this machine; None if it can.

    Weights that transformers must rearrange are copied, so the copies must fit in memory.
    """
    size, have = sum(p.stat().st_size for p in folder.glob("*.safetensors")), usable_memory()
    if size <= have:
        return None
    try:
        rearranged = any(o.converted for o in make_plan(folder, DTYPES[request.dtype], request.own_code).outputs)
    except CannotStreamError:
        rearranged = True
    if not rearranged:
        return None
    return f"the model ({size:,} bytes) does not fit in memory ({have:,}), and this family's weights cannot be mapped"


def make_proof(items: Sequence[TrainItem], logps: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the log-probs of the trained tokens of a few trajectories, and all inputs from which they are computed."""
    proof: dict[str, Tensor] = {"count": torch.tensor(len(items))}
    for i, (item, logp) in enumerate(zip(items, logps, strict=True)):
        ids = [t for s in item.segments for t in s.ids]
        trained = [s.trained for s in item.segments for _ in s.ids]
        proof |= {
            f"{i}.prompt_ids": torch.tensor(item.prompt.ids),
            f"{i}.kinds": torch.tensor(item.prompt.kinds),
            f"{i}.response_ids": torch.tensor(ids),
            f"{i}.trained": torch.tensor(trained),
            f"{i}.num_images": torch.tensor(item.prompt.num_images),
            f"{i}.logp": logp.cpu(),
        }
        proof |= {f"{i}.image.{k}": v for k, v in item.prompt.images.items()}
        if item.images:
            proof |= {f"{i}.tail_kinds": torch.tensor(item.kinds)}
            proof |= {f"{i}.tail_image.{k}": v for k, v in item.images.items()}
    return proof


@torch.no_grad()
def proof_gap(policy: Policy, proof: dict[str, Tensor]) -> float:
    """Return the largest absolute log-prob difference between the policy and a proof, in nats; NaN if one is NaN."""
    worst = 0.0
    with torch.no_grad():
        for i in range(int(proof["count"])):
            images, tail = _images(proof, f"{i}.image."), _images(proof, f"{i}.tail_image.")
            kinds = tuple(proof[f"{i}.tail_kinds"].tolist()) if tail else ()
            prompt = PromptTokens(
                tuple(proof[f"{i}.prompt_ids"].tolist()),
                tuple(proof[f"{i}.kinds"].tolist()),
                images,
                int(proof[f"{i}.num_images"]),
            )
            pairs = zip(proof[f"{i}.response_ids"].tolist(), proof[f"{i}.trained"].tolist(), strict=True)
            segments = tuple(Segment("assistant", (token,), trained) for token, trained in pairs)
            item = TrainItem(prompt, 0, segments, 0, kinds, tail)
            logp = policy(make_row([item], policy.device)).logp.cpu()
            gap = float((logp - proof[f"{i}.logp"]).abs().max()) if len(logp) else 0.0
            if math.isnan(gap):  # max() can ignore NaN
                return gap
            worst = max(worst, gap)
    return worst


def _images(proof: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in proof.items() if name.startswith(prefix)}


def main(argument: str) -> None:
    """Run the request `argument` (JSON), and print one line of JSON: the proof, or an error for the user."""
    try:
        print(json.dumps(asdict(prove(ProofRequest(**json.loads(argument))))))
    except VlmrlError as error:
        print(json.dumps({"error": {"message": error.message, "where": error.where, "hint": error.hint}}))


if __name__ == "__main__":
    main(sys.argv[1])
