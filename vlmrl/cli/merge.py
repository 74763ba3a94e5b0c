"""`vlmrl merge`: turn a checkpoint into a Hugging Face folder; show its files, the proof, and commands that use it."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, get_args

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, say, tell

if TYPE_CHECKING:
    from vlmrl.checkpoint.merge import Merged


def show_merged(done: Merged, checkpoint: str, address: str | None, adapter: bool, evaluate: str, tools: str) -> None:
    """Print the written files, the proof that the model is the same, and commands that use it.

    Args:
        evaluate: command that evaluates the model; "" = nothing says with which reward.
        tools: options of `vllm serve` for the tools of the model.
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
            f"vllm serve BASE --enable-lora --lora-modules {quote(f'trained={done.folder}')}{tools}"
        )
        return
    folder = quote(str(done.folder))
    also = f"   or   {evaluate}" if evaluate else ""
    say(f"use it: AutoModelForImageTextToText.from_pretrained({str(done.folder)!r}){also}")
    say(f"serve it: vllm serve {folder}{tools}")


def register(app: typer.Typer) -> None:
    app.command("merge", short_help="Turn a checkpoint into a Hugging Face folder.")(merge)


def merge(
    run: str = typer.Argument(..., help="Run (id, prefix, name, `last`) or a checkpoint folder."),
    out: Path | None = typer.Option(None, "--out", "-o", help="Folder to write; default: <run>/merged-<step>."),
    checkpoint: str = typer.Option(
        "best", "--checkpoint", "--step", help="Checkpoint of the run: best, last, or a step."
    ),
    dtype: str | None = typer.Option(None, "--dtype", help="float32 or bfloat16; default: as trained."),
    adapter: bool = typer.Option(
        False, "--adapter", help="Keep a LoRA adapter as a PEFT folder; default: fold it into the weights."
    ),
    base: str | None = typer.Option(
        None, "--base", help="Where the adapter's base model is now; default: where it was."
    ),
    max_shard_size: str = typer.Option(
        "5GB", "--max-shard-size", help="Maximum size of a weight file: 5GB, 500MB, 2GiB."
    ),
    skip_proof: bool = typer.Option(
        False, "--skip-proof", help="Do not reload and compare the model; the folder's merge.json says so."
    ),
    push_to_hub: str | None = typer.Option(
        None, "--push-to-hub", metavar="REPO", help="Upload the folder to this hub repository, as a private one."
    ),
    public: bool = typer.Option(False, "--public", help="With --push-to-hub: make the repository public."),
    force: bool = typer.Option(False, "--force", help="Replace the folder if it exists."),
    own_code: bool = typer.Option(
        False,
        "--trust-remote-code",
        help="Run Python code that the model's folder holds. Read it first.",
    ),
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Turn a checkpoint into a Hugging Face folder, reload it, and prove that it is the same model.

    A LoRA adapter is folded into the weights, or kept as a PEFT folder with --adapter. Weights are read and written
    tensor by tensor: the memory needed does not grow with the model.

    Example: vlmrl merge last --out models/digits
    """
    from vlmrl.errors import CheckpointError, unknown
    from vlmrl.store.checkpoints import SavedDtype, choose_checkpoint, parse_size, refuse_existing
    from vlmrl.store.layout import COMPLETE, MANIFEST, runs_root
    from vlmrl.store.runs import eval_merged, open_run

    if dtype is not None and dtype not in get_args(SavedDtype):
        raise unknown("dtype", dtype, get_args(SavedDtype), error=CheckpointError)
    parse_size(max_shard_size)
    opened = None
    if (Path(run) / COMPLETE).is_file():
        folder = Path(run)
        place = folder.absolute().parent.parent
        opened = open_run(place.parent, place.name) if (place / MANIFEST).is_file() else None
    else:
        opened = open_run(runs_root(runs), run)
        folder, why = choose_checkpoint(opened.dir, opened.manifest, checkpoint)
        say(f"{run} is {folder.name} of run {opened.id}: {why}")
    target = out or folder.parent.parent / f"{'adapter' if adapter else 'merged'}-{folder.name}"
    refuse_existing(target, force)
    # Imported here: a wrong name is reported before large libraries are loaded.
    from vlmrl.checkpoint.merge import check_access, push, tool_options
    from vlmrl.checkpoint.merge import merge as merge_checkpoint

    if push_to_hub is not None:
        check_access(push_to_hub)
    done = merge_checkpoint(
        folder,
        target,
        dtype=dtype,
        force=force,
        adapter=adapter,
        base=base,
        root=runs_root(runs),
        max_shard_size=max_shard_size,
        skip_proof=skip_proof,
        name=push_to_hub,
        own_code=own_code,
    )
    address = push(done.folder, push_to_hub, public=public) if push_to_hub is not None else None
    fields = {
        "folder": str(done.folder),
        "checkpoint": str(folder),
        "step": done.step,
        "parameters": done.parameters,
        "bytes": done.bytes,
        "logp_gap": done.logp_gap,
        "proof_skipped": done.proof.skipped,
        "loaded_whole": done.whole,
        "uploaded": address,
        "found": list(done.leftovers),
    }
    if not emit(fields, as_json):
        evaluate = eval_merged(opened, done.folder) if opened else ""
        show_merged(done, folder.name, address, adapter, evaluate, tool_options(folder))
