"""Last lines of `vlmrl merge`: written files, proof of equality, and commands that use the model."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

from vlmrl.cli.output import say, tell

if TYPE_CHECKING:
    from vlmrl.checkpoint.merge import Merged


def show_merged(done: Merged, checkpoint: str, address: str | None, adapter: bool, evaluate: str) -> None:
    """Print the written files, the proof that the model is the same, and commands that use it.

    Args:
        evaluate: command that evaluates the model; "" = nothing says with which reward.
    """
    for line in done.leftovers:
        say(f"found: {line}")
    if done.whole:
        say(f"the whole model was loaded into memory: {done.whole}")
    proof = (
        f"not proven: {done.proof.skipped}"
        if done.logp_gap is None
        else f"largest log-prob difference after reload {done.logp_gap:.1e} nats ({done.proof.tokens} tokens of "
        f"{done.proof.rollouts} rollouts, in a separate process)"
    )
    tell(f"{checkpoint} -> {done.folder}: {done.parameters:,} parameters, {done.bytes / 2**20:.1f} MiB; {proof}")
    if address is not None:
        tell(f"uploaded: {address}")
    if adapter:
        say(
            f"use it: PeftModel.from_pretrained(base, {str(done.folder)!r})   or   "
            f"vllm serve BASE --enable-lora --lora-modules {quote(f'trained={done.folder}')}"
        )
        return
    folder = quote(str(done.folder))
    also = f"   or   {evaluate}" if evaluate else ""
    say(f"use it: AutoModelForImageTextToText.from_pretrained({str(done.folder)!r}){also}")
    say(f"serve it: vllm serve {folder}")
