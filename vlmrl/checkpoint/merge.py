"""Conversion of a checkpoint to an ordinary Hugging Face folder, with a proof that it is the same model; its upload.

The model card (README.md) is written from the run's record: the source of the weights and their evaluations, and
nothing that is not in the record. Only its commands contain paths; an uploaded model card contains none. Uploads are
private by default.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any, NoReturn

from safetensors import SafetensorError

from vlmrl import __version__
from vlmrl.checkpoint.io import check_files
from vlmrl.checkpoint.load import find_base, load_checkpoint_model, put_adapter, saved_lora
from vlmrl.checkpoint.merge_weights import CannotStreamError, write_streaming
from vlmrl.checkpoint.proof import Proof, ProofRequest, base_model, merge_settings, prove_elsewhere
from vlmrl.environments.calls import form_of
from vlmrl.errors import CheckpointError, StoreError, way_out
from vlmrl.model.load import DTYPES, load_processor, write_processor
from vlmrl.model.lora import fold_adapter, read_adapter
from vlmrl.model.model_facts import quiet_transformers
from vlmrl.model.stored_weights import publishing
from vlmrl.redaction.redact import first_line
from vlmrl.rewards.identity import identity_of
from vlmrl.store import layout
from vlmrl.store.checkpoints import ADAPTER, HF, PROOF, parse_size, read_meta, refuse_existing
from vlmrl.store.evaluated_rows import (
    condition_words,
    image_condition,
    method_of,
    read_summary,
    role_label,
    set_method_of,
)
from vlmrl.store.files import TEMP_PREFIX, TRASH_PREFIX, remove_tree, sync_folder, temp_path, write_json
from vlmrl.store.kept_recipe import read_resolved
from vlmrl.store.layout import COMPLETE, MANIFEST, MERGE_RECORD
from vlmrl.store.lineage import lineage, model_of, origin_of
from vlmrl.store.manifest import Manifest, read_manifest


def check_access(repo: str) -> None:
    """Check that the repository's name is valid and that the hub accepts the token, before hours of work begin.

    Raises: CheckpointError.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise CheckpointError(
            f"`{repo}` is not a valid name of a hub repository: {first_line(error)}",
            hint="write it as ORGANISATION/NAME",
        ) from None
    try:
        HfApi().whoami()
    except Exception as error:  # each network library has its own exceptions
        _refused("the hub does not accept your token", error, "hf auth login, or set HF_TOKEN")


def push(folder: Path, repo: str, *, public: bool = False) -> str:
    """Upload all files of the folder as one commit. Return the commit's address.

    The repository is created if it does not exist.

    Raises: CheckpointError if the upload fails. If the repository exists and is public but `public` is False, nothing
        is uploaded.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    hint = f"the folder is complete; to upload it later: hf upload {repo} {folder}"
    try:
        repository = api.create_repo(repo, private=not public, exist_ok=True)
        is_public = api.repo_info(repository.repo_id).private is False
    except Exception as error:  # as above
        _refused(f"the hub repository {repo} cannot be created or read", error, hint)
    if is_public and not public:
        raise CheckpointError(
            f"the hub repository {repo} exists and is public: nothing was uploaded",
            hint="make it private, choose another, or give --public",
        )
    try:
        message = f"Upload {folder.name} (vlmrl merge)"
        return str(api.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message=message).commit_url)
    except Exception as error:  # as above
        _refused(f"the upload to {repo} failed", error, hint)


def _refused(what: str, error: Exception, hint: str) -> NoReturn:
    raise CheckpointError(f"{what}: {first_line(error)}", hint=hint) from error


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
    how = "supervised fine-tuning" if meta.get("kind") == "sft" else "reinforcement learning"
    what = "A LoRA adapter for" if adapter else "A vision-language model trained from"
    parts = [
        _front_matter(base, recipe, adapter),
        f"# {title}, step {meta['step']}\n",
        f"{what} {_cell(base) or 'an unnamed base'} by {how} with vlmrl {__version__}.\n",
        "## Where it comes from\n\n" + _table(("", ""), _lineage(meta, manifest, recipe, origin)),
        "## Evaluation\n\n" + _evaluation(run_dir, checkpoint, manifest),
        "## Proof\n\n" + _proof(proof),
        "## Use\n\n" + _use(name, meta.get("base") or {}, base_path, adapter, tool_options(checkpoint)),
    ]
    return "\n".join(parts)


SHOWS_TOOLS = "It was trained to call the tools above: give their schemas with each request, and run the calls."
PARSERS = {"hermes": "hermes", "qwen_xml": "qwen3_xml", "gemma4": "gemma4", "glm": "glm45"}
"""Form of calls (environments/calls.py) -> name of vLLM's parser of it."""


def tool_options(checkpoint: Path) -> str:
    """Return the options of `vllm serve` for a model that was trained with tools; "" for others."""
    recipe = _recipe(checkpoint.absolute().parent.parent)
    settings = [recipe.get("environment"), *((data or {}).get("environment") for data in recipe.get("data") or ())]
    forms = [one.get("calls", "auto") for one in settings if isinstance(one, Mapping) and one.get("name")]
    if not forms:
        return ""
    template = checkpoint / HF / "chat_template.jinja"
    form = forms[0]
    if form == "auto" and template.is_file():
        form = form_of(template.read_text(encoding="utf-8", errors="replace"))
    return f" --enable-auto-tool-choice --tool-call-parser {PARSERS.get(str(form), 'PARSER')}"


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
        state = ", all of its state" if manifest.forked_at is not None else ""
        parent = f"run {manifest.parent.get('run')}, {manifest.parent.get('checkpoint')}{state}"
        rows.append(("started from", parent))
    if recipe:
        rows.append(("training", _training(recipe)))
    for d in manifest.datasets:
        what = f"{d.get('name')}: task {d.get('task')}, split {d.get('split')}, {d.get('rows')} rows"
        rows.append(("data", f"{what}, fingerprint {str(d.get('fingerprint') or 'unknown')[:12]}"))
    rows += [("reward", f"{r.get('source')}: {identity_of(r).words}") for r in manifest.rewards]
    for prompt in manifest.prompts:
        if environment := prompt.get("environment"):
            tools = [tool["function"]["name"] for tools in environment["tools"].values() for tool in tools]
            what = f"{environment['name']} (sha256 {str(environment['sha256'])[:12]}) with {', '.join(tools)}"
            rows.append(("tools", f"{prompt.get('source')}: environment {what}"))
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
        if (change := image_condition(meta)) is not None:
            notes.append(f"{folder.name}: run {condition_words(change)}: this measures what the model needs.")
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


def _use(name: str, meta_base: Mapping[str, Any], base_path: str | None, adapter: bool, tools: str) -> str:
    """Return the commands that use the model. `tools`: see `tool_options`."""
    note = f"\n{SHOWS_TOOLS}\n" if tools else ""
    if adapter:
        base = _base_name(meta_base)
        where = base if HUB_NAME.fullmatch(base) else base_path or "BASE"
        get = _cell(base) or "it is not recorded"
        if meta_base.get("run"):
            get = f"`vlmrl merge {meta_base['run']} --checkpoint {meta_base.get('step')} --out BASE` writes it"
        missing = "" if where != "BASE" else f"`BASE` is a folder with the base model: {get}.\n\n"
        return (
            f"{missing}```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForImageTextToText\n\n"
            f'base = AutoModelForImageTextToText.from_pretrained({json.dumps(where)}, dtype="auto")\n'
            f"model = PeftModel.from_pretrained(base, {json.dumps(name)})\n```\n\n"
            f"```\nvllm serve {quote(where)} --enable-lora --lora-modules {quote(f'trained={name}')}{tools}\n```\n"
            f"{note}"
        )
    return (
        "```python\nfrom transformers import AutoModelForImageTextToText, AutoProcessor\n\n"
        f'model = AutoModelForImageTextToText.from_pretrained({json.dumps(name)}, dtype="auto")\n'
        f"processor = AutoProcessor.from_pretrained({json.dumps(name)})\n```\n\n"
        f"```\nvllm serve {quote(name)}{tools}\n```\n{note}"
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
    root: Path | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    skip_proof: bool = False,
    name: str | None = None,
    own_code: bool = False,
) -> Merged:
    """Write the checkpoint as a Hugging Face folder: weights, config, generation config, processor, chat template.

    Weights are read and written tensor by tensor, so memory does not grow with the model. The result is first written
    to a folder beside `out` and loaded again in a second process. If its log-probs equal those that were saved with the
    checkpoint, it is renamed to `out`.

    Args:
        dtype: dtype of the written weights; default: the dtype in which they were trained.
        force: replace an existing folder.
        adapter: write the adapter as a PEFT folder instead of merging it.
        base: present folder of the adapter's base model, if it was moved.
        root: folder of the runs, in which that is searched; None = the usual one.
        max_shard_size: maximum size of a weight file, such as 5GB or 500MB; a larger tensor gets a file of its own.
        skip_proof: do not load the result again; this is recorded in the folder's merge.json.
        name: repository to which the folder will be uploaded.
        own_code: whether code in the folders of the checkpoint and its base model may be run.
    Raises: CheckpointError if the checkpoint is damaged, `out` exists, or the reloaded model differs.
    """
    shard_bytes = parse_size(max_shard_size)
    notes = remove_leftovers(out)
    refuse_existing(out, force, notes)
    meta = read_meta(checkpoint)
    _check_options(checkpoint, dtype, adapter, base)
    if saved_lora(checkpoint) is not None:
        base = str(find_base(checkpoint, base, root))
    for part in (HF, PROOF):
        check_files(checkpoint, part)
    whole = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _writing(out, checkpoint.parent.parent) as temp:
            if adapter:
                for file in check_files(checkpoint, ADAPTER):
                    shutil.copyfile(checkpoint / file, temp / Path(file).name)
                parameters = sum(t.numel() for t in read_adapter(temp).values())
            else:
                parameters, whole = _write_merged(checkpoint, temp, dtype, base, shard_bytes, own_code)
            with quiet_transformers():
                write_processor(load_processor(merge_settings(checkpoint, own_code)), temp)
            request = ProofRequest(str(checkpoint), str(temp), dtype or meta["dtype"], adapter, base, own_code)
            proof = Proof(None, skipped="--skip-proof") if skip_proof else prove_elsewhere(request)
            write_json(temp / MERGE_RECORD, _record(checkpoint, request, proof, whole))
            # A model card that is uploaded must not name a folder of this machine.
            # Nor can transformers load the base from a run's checkpoint.
            place = find_base(checkpoint, base) if adapter and name is None else None
            where = None if isinstance(place, Path) else place
            card = model_card(checkpoint, proof, adapter=adapter, name=name or str(out), base_path=where)
            (temp / CARD).write_text(card, "utf-8")
            _publish(temp, out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the merged model could not be written: {error}",
            where=str(out),
            hint=f"{way_out(error)}; --out names another folder; nothing was written",
        ) from error
    size = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    return Merged(out, meta["step"], parameters, size, proof, whole, tuple(notes))


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
