"""Model card of a merged folder (README.md), written from the run's record.

It states the source of the weights and their evaluations, and nothing that is not in the record. Only its commands
contain paths; an uploaded model card contains none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from vlmrl import __version__
from vlmrl.checkpoint.proof import Proof
from vlmrl.errors import StoreError
from vlmrl.rewards.identity import identity_of
from vlmrl.store import layout
from vlmrl.store.checkpoints import read_meta
from vlmrl.store.evaluated_rows import images_of, method_of, read_summary, role_label, set_method_of
from vlmrl.store.kept_recipe import read_resolved
from vlmrl.store.lineage import lineage, model_of, origin_of
from vlmrl.store.manifest import Manifest, read_manifest

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def model_card(checkpoint: Path, proof: Proof, *, adapter: bool, name: str, base_path: str | None = None) -> str:
    """Return the model card: Markdown with the front matter of the hub.

    Args:
        adapter: whether the folder holds an adapter instead of a whole model.
        name: path of the folder or name of the repository, for the commands.
        base_path: path of the adapter's base model for the commands; None = the commands have `BASE` in its place.
    """
    meta = read_meta(checkpoint)
    run_dir = checkpoint.absolute().parent.parent
    try:
        manifest = read_manifest(run_dir)
    except StoreError:  # the checkpoint was moved out of its run
        manifest = None
    recipe = _recipe(run_dir)
    origin = (meta.get("base") or {}) if adapter else _first_base(run_dir, meta)
    base = _base_name(origin)
    title = (manifest.name or manifest.recipe) if manifest else Path(name).name
    parts = [
        _front_matter(base, recipe, adapter),
        f"# {title}, step {meta['step']}\n",
        _summary(meta, base, adapter),
        "## Where it comes from\n\n" + _table(("", ""), _lineage(meta, manifest, recipe, origin)),
        "## Evaluation\n\n" + _evaluation(run_dir, checkpoint, manifest),
        "## Proof\n\n" + _proof(proof),
        "## Use\n\n" + _use(name, meta.get("base") or {}, base_path, adapter),
    ]
    return "\n".join(parts)


def _recipe(run_dir: Path) -> Mapping[str, Any]:
    try:
        return read_resolved(run_dir)["recipe"]
    except StoreError:
        return {}


def _first_base(run_dir: Path, meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the base that the first of the runs behind these weights was trained from."""
    *_, (place, manifest) = [*lineage(run_dir)] or [(run_dir, None)]
    if manifest is not None and (run := origin_of(place, manifest)):
        return {"run": run}  # which is gone
    return model_of(place) if place != run_dir else meta.get("base") or {}


def _base_name(base: Mapping[str, Any]) -> str:
    """Return the name of the base model: its hub name, the last part of its folder, or the run that trained it."""
    path = str(base.get("path") or "")
    if base.get("run"):
        return f"run {base['run']}" + (f", step {base['step']}" if "step" in base else "")
    if not Path(path).exists() and ("/" not in path or HUB_NAME.fullmatch(path)):
        return path
    return f"{Path(path).name} (a local folder)"


def _front_matter(base: str, recipe: Mapping[str, Any], adapter: bool) -> str:
    algorithm = (recipe.get("algo") or {}).get("name") if recipe.get("kind") == "rl" else "sft" if recipe else None
    tags = ["vlmrl", *([algorithm] if algorithm else []), *(["lora"] if recipe.get("lora") else [])]
    lines = ["---", f"library_name: {'peft' if adapter else 'transformers'}", "pipeline_tag: image-text-to-text"]
    lines += [f"base_model: {base}"] if HUB_NAME.fullmatch(base) else []
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in tags), "---\n"])


def _summary(meta: Mapping[str, Any], base: str, adapter: bool) -> str:
    how = "supervised fine-tuning" if meta.get("kind") == "sft" else "reinforcement learning"
    what = "A LoRA adapter for" if adapter else "A vision-language model trained from"
    return f"{what} {_cell(base) or 'an unnamed base'} by {how} with vlmrl {__version__}.\n"


def _lineage(
    meta: Mapping[str, Any], manifest: Manifest | None, recipe: Mapping[str, Any], origin: Mapping[str, Any]
) -> list[tuple[str, str]]:
    revision = origin.get("revision")
    rows = [("base model", _base_name(origin) + (f" (revision {revision})" if revision else ""))]
    if lora := meta.get("lora"):
        kind = "DoRA" if lora.get("dora") else "rsLoRA" if lora.get("rslora") else "LoRA"
        rows.append(("adapter", f"{kind}, rank {lora['rank']}, alpha {lora['alpha']}"))
    rows += [("step", str(meta["step"])), ("trained in", meta["dtype"])]
    if manifest is None:
        return [*rows, ("run", "unknown: the checkpoint was moved out of its run")]
    rows += [("run", manifest.id), ("recipe", f"{manifest.recipe} (sha256 {manifest.recipe_sha256[:12] or 'unknown'})")]
    if manifest.parent:
        rows.append(
            (
                "started from",
                f"run {manifest.parent.get('run')}, {manifest.parent.get('checkpoint')}"
                f"{', all of its state' if manifest.forked_at is not None else ''}",
            )
        )
    if recipe:
        rows.append(("training", _training(recipe)))
    for d in manifest.datasets:
        fingerprint = str(d.get("fingerprint") or "unknown")[:12]
        rows.append(
            (
                "data",
                f"{d.get('name')}: task {d.get('task')}, split {d.get('split')}, {d.get('rows')} rows, "
                f"fingerprint {fingerprint}",
            )
        )
    rows += [("reward", f"{r.get('source')}: {identity_of(r).words}") for r in manifest.rewards]
    if manifest.git:
        dirty = ", with uncommitted changes" if manifest.git.get("dirty") else ""
        rows.append(("code", f"commit {str(manifest.git.get('commit'))[:12]}{dirty}"))
    return rows + [("note", label) for label in manifest.labels]


def _training(recipe: Mapping[str, Any]) -> str:
    train, optim = recipe.get("train") or {}, recipe.get("optim") or {}
    settings = f"{train.get('steps')} steps planned, seed {train.get('seed')}, learning rate {optim.get('lr')}"
    if recipe.get("kind") != "rl":
        return f"supervised, {settings}"
    rollout = recipe.get("rollout") or {}
    shape = f"{rollout.get('prompts_per_step')} prompts x {rollout.get('samples_per_prompt')} samples per step"
    return f"{(recipe.get('algo') or {}).get('name')}, {shape}, temperature {rollout.get('temperature')}, {settings}"


def _evaluation(run_dir: Path, checkpoint: Path, manifest: Manifest | None) -> str:
    """Return a table of all evaluations of exactly this checkpoint, with intervals and the role of their rows."""
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    methods: dict[str, None] = {}
    for folder in layout.eval_dirs(run_dir):
        try:
            summary = read_summary(folder)
            meta, metrics = summary.get("meta") or {}, summary["metrics"]
        except StoreError:
            rows.append((folder.name, "", "its summary is damaged", "", "", ""))
            continue
        if meta.get("step") != layout.parse_checkpoint_name(checkpoint.name):
            continue
        if (change := images_of(meta)) is not None:
            notes.append(f"{folder.name}: the model saw changed images ({change}), to measure how much it needs them.")
        split = "validation in training" if meta.get("during") else f"{meta.get('source')}/{meta.get('split')}"
        methods[f": {method_of(summary)}"] = None
        if of_sets := set_method_of(summary):
            methods[f" {of_sets}"] = None
        if (label := role_label(meta)) and not meta.get("during"):
            notes.append(f"{folder.name} was made on {label}.")
        for name, m in metrics.items():
            if not name.startswith("part/"):
                rows.append((folder.name, split, name, _number(m["value"]), _interval(m), str(m["n"])))
    if rows:
        notes += [f"Intervals{method}." for method in methods]
        table = _table(("evaluation", "data", "metric", "value", "95% interval", "rows"), rows)
        return table + "\n" + "\n\n".join(notes) + "\n"
    best = manifest.best if manifest else None
    if best is not None and best.step == layout.parse_checkpoint_name(checkpoint.name):
        return f"Validation during training: {best.metric} {best.value:.4g}. No evaluation with intervals was made.\n"
    return "This checkpoint was not evaluated.\n"


def _proof(proof: Proof) -> str:
    if proof.logp_gap is None:
        return f"Not proven: {proof.skipped}.\n"
    return (
        f"Loaded again in a separate process, the model gives the log-probs that were saved in training: largest "
        f"difference {proof.logp_gap:.1e} nats over {proof.tokens} tokens of {proof.rollouts} rollouts "
        f"(limit {proof.limit:g}).\n"
    )


def _how_to_get(base: Mapping[str, Any]) -> str:
    """Return the name of the base model, or for another run's checkpoint the command that writes it to `BASE`."""
    if base.get("run"):
        return f"`vlmrl merge {base['run']} --checkpoint {base.get('step')} --out BASE` writes it"
    return _cell(_base_name(base)) or "it is not recorded"


def _use(name: str, meta_base: Mapping[str, Any], base_path: str | None, adapter: bool) -> str:
    if adapter:
        base = _base_name(meta_base)
        where = base if HUB_NAME.fullmatch(base) else base_path or "BASE"
        missing = "" if where != "BASE" else f"`BASE` is a folder with the base model: {_how_to_get(meta_base)}.\n\n"
        return (
            f"{missing}```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForImageTextToText\n\n"
            f'base = AutoModelForImageTextToText.from_pretrained({json.dumps(where)}, dtype="auto")\n'
            f"model = PeftModel.from_pretrained(base, {json.dumps(name)})\n```\n\n"
            f"```\nvllm serve {quote(where)} --enable-lora --lora-modules {quote(f'trained={name}')}\n```\n"
        )
    return (
        "```python\nfrom transformers import AutoModelForImageTextToText, AutoProcessor\n\n"
        f'model = AutoModelForImageTextToText.from_pretrained({json.dumps(name)}, dtype="auto")\n'
        f"processor = AutoProcessor.from_pretrained({json.dumps(name)})\n```\n\n```\nvllm serve {quote(name)}\n```\n"
    )


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(_cell(c) for c in line) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    """Return the text on one line, escaped so that it cannot end a table cell or open a tag."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _interval(m: Mapping[str, Any]) -> str:
    return "" if m["low"] is None or m["high"] is None else f"[{_number(m['low'])}, {_number(m['high'])}]"
