"""Everything a run holds while it trains, how it is put together, and what a checkpoint keeps of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from vlmrl.algo.family import algorithm_of
from vlmrl.checkpoint import io
from vlmrl.checkpoint.format import ADAPTER, HF, read_meta
from vlmrl.checkpoint.load import fingerprint, load_saved, saved_lora
from vlmrl.checkpoint.proof import make_proof
from vlmrl.data.batch import TrainItem
from vlmrl.data.encode import Encoder
from vlmrl.data.sampler import PromptStream
from vlmrl.dist import worker
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import CheckpointError, DataError, StoreError
from vlmrl.model.load import DTYPES, banned_ids_of, load_model, load_processor, pick_device, prepare_model, stop_ids_of
from vlmrl.model.lora import CONFIG_FILE, ReferencePolicy, attach_adapter, fold_adapter, read_adapter, trained_parts
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Lora, Model, Recipe
from vlmrl.rewards.scorer import Scorer
from vlmrl.store.layout import COMPLETE, MANIFEST, checkpoint_dir, complete_checkpoints
from vlmrl.store.listing import run_ids
from vlmrl.store.provenance import usable_cores
from vlmrl.store.runs import Run, open_run
from vlmrl.tasks.source import Source, open_source, open_validation
from vlmrl.train.optim import Optimizer
from vlmrl.types import Group, SamplingParams

PROOF_ROLLOUTS = 8
"""Rollouts whose log-probs go into each checkpoint."""


class Watcher(Protocol):
    """Who is told what happens: the console. All methods return at once and never raise."""

    def message(self, text: str) -> None: ...
    def generated(self, done: int, total: int) -> None: ...
    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None: ...
    def validation(self, step: int, summary: Mapping[str, Any], best: bool) -> None: ...
    def sample(self, step: int, group: Group) -> None: ...


@dataclass(frozen=True)
class ModelOrigin:
    """Where a run's first weights come from: a Hugging Face folder or name, or a checkpoint of another run."""

    path: str
    checkpoint: Path | None = None
    parent: Mapping[str, Any] | None = None

    @property
    def files(self) -> str:
        """Where config and processor are loaded from."""
        return str(self.checkpoint / HF) if self.checkpoint else self.path


def find_model(path: str, runs_root: Path, which: str | int = "best") -> ModelOrigin:
    """What `model.path` names: a local folder, a checkpoint folder, a run (one of its checkpoints), else a hub name.

    Args: which: checkpoint of a run: "best", "last", or a step.
    Raises: StoreError or CheckpointError when it names a run that has no complete checkpoint.
    """
    folder = Path(path)
    if (folder / "config.json").is_file():
        return ModelOrigin(path)
    if (folder / COMPLETE).is_file():
        return ModelOrigin(path, folder, {"checkpoint": folder.name, "run": folder.parent.parent.name})
    run = _last_trained(runs_root) if path == "last" else _run_named(path, runs_root)
    if run is not None:
        checkpoint = run.checkpoint(which)
        return ModelOrigin(path, checkpoint, {"run": run.id, "checkpoint": checkpoint.name})
    if (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{path} holds an adapter without its base model", where=path,
                              hint="name the run that made it, or fold it in: vlmrl merge RUN")  # fmt: skip
    if folder.is_dir():
        raise CheckpointError(f"{path} holds no model: there is no config.json, and it is no run", where=path)
    return ModelOrigin(path)


def _last_trained(runs_root: Path) -> Run | None:
    """The newest run that has a checkpoint: `last` as a model must not stop at a `vlmrl try` or an evaluation."""
    for name in run_ids(runs_root):
        if complete_checkpoints(runs_root / name):
            return open_run(runs_root, name)
    return None


def _run_named(path: str, runs_root: Path) -> Run | None:
    """The run that `path` names, or None: then it is taken for a hub name, and the hub says whether it is one."""
    try:
        return open_run(runs_root, path)
    except StoreError as error:
        if (Path(path) / MANIFEST).exists() or "more than one" in error.message:
            raise
        return None


def origin_of(run: Run, path: str, runs_root: Path) -> ModelOrigin:
    """Where this run's first weights come from, as its manifest recorded it: `last`, and a run's best checkpoint, mean
    something else by now.
    """
    parent = run.manifest.parent
    if parent is None or (Path(path) / COMPLETE).is_file():
        return find_model(path, runs_root)
    step = int(parent["checkpoint"].rpartition("-")[2])
    return ModelOrigin(path, checkpoint_dir(runs_root / parent["run"], step), parent)


def load_origin(settings: Model, origin: ModelOrigin, lora: Lora | None = None) -> tuple[Any, Any]:
    """(model, processor) of an origin, on the device and in the dtype of the settings; an adapter is left attached."""
    processor = load_processor(settings, path=origin.files)
    if origin.checkpoint is None:
        return load_model(settings, path=origin.path), processor
    return load_saved(origin.checkpoint, settings, lora), processor


def load_for_training(recipe: Recipe, origin: ModelOrigin) -> tuple[Any, Any, dict[str, Any]]:
    """(model, processor, what the adapter sits on) at the start of a run; the last is path and revision without one.

    An adapter goes on as the adapter it was; with no `[lora]` table it is folded in and all weights are trained.
    Raises: CheckpointError as `load_origin`, or when the recipe's `[lora]` table is not that of the origin's adapter.
    """
    base: dict[str, Any] = {"path": origin.path, "revision": recipe.model.revision}
    before = None if origin.checkpoint is None else saved_lora(origin.checkpoint)
    if recipe.model.quantize and before is None and origin.checkpoint is not None:
        raise CheckpointError(f"model.quantize needs a Hugging Face folder or hub name, and `{origin.path}` is a run",
                              hint=f"vlmrl merge {origin.path} --out FOLDER, then --set model.path=FOLDER")  # fmt: skip
    if before is not None and recipe.lora is not None:
        _same_adapter(before, recipe.lora, origin)
    model, processor = load_origin(recipe.model, origin, recipe.lora)
    if recipe.lora is None:
        if before is not None:
            prepare_model(fold_adapter(model), recipe.model)
        return model, processor, base
    if before is not None:
        assert origin.checkpoint is not None
        return model, processor, read_meta(origin.checkpoint)["base"]
    if origin.parent is not None:
        base |= {"run": origin.parent["run"], "step": int(origin.parent["checkpoint"].rpartition("-")[2])}
    base["fingerprint"] = fingerprint(model)
    attach_adapter(model, recipe.lora, recipe.model.freeze, DTYPES[recipe.model.dtype])
    return model, processor, base


def _same_adapter(before: Lora, now: Lora, origin: ModelOrigin) -> None:
    """Raise unless an adapter can go on under this `[lora]` table; dropout is no property of its weights."""
    pairs = [(k, v, getattr(now, k)) for k, v in before.model_dump().items() if k != "dropout"]
    for name, was, is_now in pairs:
        if was != getattr(now, name):
            raise CheckpointError(
                f"`lora.{name}` is {is_now}, but the adapter of `{origin.path}` was made with {was}",
                hint=f"use {was}; or train on the merged model: vlmrl merge {origin.path} --out FOLDER",
            )


def make_policy(
    settings: Model, model: Any, processor: Any, temperature: float, entropy_gradient: bool = False,
    critic: bool = False,
) -> Policy:  # fmt: skip
    """The policy of a recipe: this model at this temperature, with image, video and padding ids banned."""
    banned = banned_ids_of(model, processor.tokenizer)
    return Policy(
        model, temperature=temperature, banned_ids=banned, entropy_gradient=entropy_gradient,
        shared_prefix=settings.shared_prefix, critic=critic,
    )  # fmt: skip


def make_encoder(settings: Model, processor: Any) -> Encoder:
    return Encoder(
        processor, min_pixels=settings.min_pixels, max_pixels=settings.max_pixels, thinking=settings.thinking
    )


def sampling_params(recipe: Recipe, policy: Policy, tokenizer: Any) -> SamplingParams:
    """How training samples."""
    r = recipe.rollout
    return SamplingParams(
        temperature=r.temperature, top_p=r.top_p, top_k=r.top_k, max_new_tokens=r.max_new_tokens,
        stop_ids=stop_ids_of(policy.model, tokenizer), stop=tuple(r.stop), banned_ids=policy.banned_ids,
    )  # fmt: skip


def greedy_params(recipe: Recipe, policy: Policy, tokenizer: Any) -> SamplingParams:
    """How validation and `eval` sample by default."""
    limit = recipe.eval.max_new_tokens or recipe.rollout.max_new_tokens
    params = sampling_params(recipe, policy, tokenizer)
    return replace(params, temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=limit)


@dataclass
class Progress:
    """What a run has to remember besides weights: all of it goes into a checkpoint's data.json.

    Args:
        step: policy version = steps taken.
        best_step, best_value: of the validation metric; None before the first validation.
        stale: validations since the best.
        validated: step of the last validation; -1 before the first.
        samples, reward_errors: since the run began.
        seconds: of training, over all attempts.
        kl_coef: the KL coefficient as steered so far; None = the recipe's, untouched.
        halved: token budgets that memory had no room for: recipe key -> [its value in the recipe, what it is now].
    """

    step: int = 0
    best_step: int | None = None
    best_value: float | None = None
    stale: int = 0
    validated: int = -1
    samples: int = 0
    reward_errors: int = 0
    seconds: float = 0.0
    kl_coef: float | None = None
    halved: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Session:
    """A run that trains. Made by `open_session`; `close` ends its reward workers."""

    recipe: Recipe
    run: Run
    policy: Policy
    optimizer: Optimizer
    processor: Any
    encoder: Encoder
    sources: list[Source]
    validation: list[Source]
    stream: PromptStream
    scorers: dict[str, Scorer]
    origin: ModelOrigin
    watcher: Watcher
    world: World = ALONE
    progress: Progress = field(default_factory=Progress)
    counted_before: tuple[int, int] = (0, 0)
    """Samples and failed rewards of earlier attempts: a mended reward does not answer for them."""
    reference: Policy | ReferencePolicy | None = None
    base: Mapping[str, Any] = field(default_factory=dict)
    """What the weights come from (path, revision); with an adapter, what it sits on, with its checksum."""
    proof_items: list[TrainItem] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Seconds of training over all attempts."""
        return self.progress.seconds + time.perf_counter() - self.started

    def close(self) -> None:
        self.stack.close()


def open_sources(recipe: Recipe) -> tuple[list[Source], list[Source]]:
    """(training sources, validation sources) of a recipe.

    Raises: DataError and others as `open_source`; DataError when validation is on the test split without permission.
    """
    sources = [open_source(d, recipe.reward) for d in recipe.data]
    found = [v for v in (open_validation(d, recipe.reward) for d in recipe.data) if v is not None]
    for v in found:
        if v.split == "test" and not recipe.eval.allow_test_split:
            raise DataError(
                f"source `{v.name}` validates on its test split: choosing a checkpoint by it would spoil the test",
                hint="use a validation split, or set eval.allow_test_split = true (the run is then labelled)",
            )
    return sources, found


def open_session(recipe: Recipe, run: Run, runs_root: Path, watcher: Watcher, *, resume: Path | None = None) -> Session:
    """Load everything a run needs; with `resume`, continue exactly where that checkpoint was saved.

    Raises: the errors of data, rewards, model and checkpoint.
    """
    torch.manual_seed(recipe.train.seed)
    if pick_device(recipe.model.device).type == "cpu":
        torch.set_num_threads(usable_cores())
    sources, validation = open_sources(recipe)
    if any(v.split == "test" for v in validation):
        run.add_label("validated on the test split")
    origin = origin_of(run, recipe.model.path, runs_root)
    # Resumed, nothing but the checkpoint is read, unless it holds an adapter: that needs its base model.
    start = origin if resume is None else replace(origin, checkpoint=resume)
    model, processor, base = load_for_training(recipe, start)
    temperature = recipe.rollout.temperature if recipe.kind == "rl" else 1.0
    algorithm = algorithm_of(recipe.algo) if recipe.kind == "rl" else None
    critic = algorithm is not None and algorithm.needs_critic
    policy = make_policy(recipe.model, model, processor, temperature, recipe.algo.entropy_coef != 0, critic)
    run.write_log(f"rows are run by: {policy.path}")
    if policy.sharing == "padded" and recipe.model.shared_prefix:
        watcher.message(f"no shared prefix: {policy.path}")
    session = Session(
        recipe=recipe, run=run, policy=policy, processor=processor,
        optimizer=Optimizer(policy.model, recipe.optim, policy.value_head),
        encoder=make_encoder(recipe.model, processor), sources=sources, validation=validation,
        stream=PromptStream([len(s.rows) for s in sources], [s.share for s in sources], recipe.train.seed),
        scorers={}, origin=origin, watcher=watcher, base=base,
    )  # fmt: skip
    watcher.message(f"{trained_parts(model)}{'; and a value head' if critic else ''}")
    for source in [*sources, *validation]:
        if source.name not in session.scorers:
            session.scorers[source.name] = session.stack.enter_context(make_scorer(source, recipe))
    if algorithm is not None and algorithm.kl_coef > 0:
        session.reference = _reference(session, temperature)
    if resume is not None:
        restore(session, resume)
    return session


def make_scorer(source: Source, recipe: Recipe) -> Scorer:
    """The scorer of a source, with the recipe's limits."""
    r = recipe.reward
    return Scorer(
        source.reward, source.weights, timeout_seconds=r.timeout_seconds, memory_mb=r.memory_mb, workers=r.workers
    )


def _reference(session: Session, temperature: float) -> Policy | ReferencePolicy:
    """The first weights, frozen, for the KL term: a copy, or with an adapter the policy's own model without it."""
    recipe, origin = session.recipe, session.origin
    if recipe.lora is None:
        model, processor, _ = load_for_training(recipe, origin)
        return make_policy(recipe.model, model.requires_grad_(False), processor, temperature)
    if origin.checkpoint is None or saved_lora(origin.checkpoint) is None:
        return ReferencePolicy(session.policy)
    io.check_files(origin.checkpoint, ADAPTER)
    return ReferencePolicy(session.policy, read_adapter(origin.checkpoint / ADAPTER))


def save(session: Session) -> Path:
    """Save a checkpoint of the session as it is, then remove the old ones that the recipe does not keep."""
    s, recipe = session, session.recipe
    worker.phase("saving", s.progress.step)
    meta = {
        "kind": recipe.kind, "dtype": recipe.model.dtype, "model_type": s.policy.model.config.model_type,
        "base": dict(s.base),
        "policy": {"temperature": s.policy.temperature, "banned_ids": list(s.policy.banned_ids)},
        "encoder": {k: getattr(recipe.model, k) for k in ("min_pixels", "max_pixels", "thinking")},
        "optimizer_updates": s.optimizer.updates,
    }  # fmt: skip
    if recipe.lora is not None:
        meta |= {"lora": recipe.lora.model_dump(mode="json"), "freeze": list(recipe.model.freeze),
                 "quantize": recipe.model.quantize}  # fmt: skip
    data = {"progress": asdict(replace(s.progress, seconds=s.seconds)), "stream": s.stream.state_dict()}
    # One rollout a prompt: more prompts prove more.
    items = list({item.group: item for item in s.proof_items}.values())[:PROOF_ROLLOUTS]
    proof = make_proof(s.policy, items) if items else {}
    value_head = {} if s.policy.value_head is None else s.policy.value_head.state_dict()
    saved = io.Saved(s.progress.step, meta, data, proof, value_head)
    folder = io.save_checkpoint(s.run.dir, saved, s.policy.model, s.processor, s.optimizer.state_tensors())
    keep = [s.progress.best_step] if recipe.checkpoint.keep_best and s.progress.best_step is not None else []
    s.run.prune_checkpoints(recipe.checkpoint.keep_last, keep)
    s.run.event(s.progress.step, "checkpoint saved", folder=folder.name)
    return folder


def restore(session: Session, folder: Path) -> None:
    """Put a checkpoint's optimizer, value head, data position, counters and random state into the session, whose model
    has the checkpoint's weights already.
    """
    meta = read_meta(folder)
    if session.policy.value_head is not None:
        session.policy.value_head.load_state_dict(io.load_value_head(folder))
    session.optimizer.load_state_tensors(io.load_optimizer_tensors(folder), meta["optimizer_updates"])
    data = io.load_data(folder)
    session.progress = Progress(**data["progress"])
    session.counted_before = (session.progress.samples, session.progress.reward_errors)
    session.stream.load_state_dict(data["stream"])
    io.load_rng(folder)


def draw_rows(session: Session, count: int) -> Sequence[tuple[Source, Any, int]]:
    """The next rows of the mixed stream: (source, row, occurrence)."""
    return [
        (session.sources[s], session.sources[s].rows[r], occurrence) for s, r, occurrence in session.stream.next(count)
    ]
