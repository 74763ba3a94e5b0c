"""Everything a run holds while it trains, how it is put together, and what a checkpoint keeps of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from vlmrl.algo.family import algorithm_of
from vlmrl.checkpoint import io
from vlmrl.checkpoint.files import check_files
from vlmrl.checkpoint.format import ADAPTER, HF
from vlmrl.checkpoint.load import fingerprint, load_saved, saved_lora
from vlmrl.data.batch import TrainItem
from vlmrl.data.encode import Encoder
from vlmrl.data.sampler import PromptStream
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import CheckpointError, DataError
from vlmrl.model.load import DTYPES, banned_ids_of, load_model, load_processor, pick_device, prepare_model, stop_ids_of
from vlmrl.model.lora import attach_adapter, fold_adapter, read_adapter, trained_parts
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Lora, Model, Recipe
from vlmrl.recipe.settle import require_settled
from vlmrl.rewards.scorer import Scorer
from vlmrl.store.provenance import usable_cores
from vlmrl.store.prune import RolloutRule
from vlmrl.store.runs import Run
from vlmrl.store.sealed import read_meta
from vlmrl.tasks.source import Source, open_source, open_validation, scores_responses
from vlmrl.train.health import Health
from vlmrl.train.optim import Optimizer
from vlmrl.train.origin import ModelOrigin, origin_of
from vlmrl.train.progress import Progress
from vlmrl.train.reference import ReferencePolicy
from vlmrl.train.rollout_writer import RolloutWriter
from vlmrl.train.saver import Saver
from vlmrl.train.sending import Loggers
from vlmrl.train.sharing import check_sharing, make_filler, on_cpu, shard_policy
from vlmrl.types import Group, SamplingParams, hash64


class Watcher(Protocol):
    """Who is told what happens: the console. All methods return at once and never raise."""

    def message(self, text: str) -> None: ...
    def generated(self, done: int, total: int) -> None: ...
    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None: ...
    def validation(self, step: int, summary: Mapping[str, Any], best: bool) -> None: ...
    def sample(self, step: int, group: Group) -> None: ...


def load_origin(settings: Model, origin: ModelOrigin, lora: Lora | None = None) -> tuple[Any, Any]:
    """(model, processor) of an origin, on the device and in the dtype of the settings; an adapter is left attached."""
    if origin.checkpoint is not None:
        check_files(origin.checkpoint, HF)  # a changed chat template would be another model
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
        base |= {"run": origin.parent["run"], "step": origin.step}
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
    world: World = ALONE
    """The processes of the run. All of them go through the same steps, in which they meet; that of rank 0 writes."""
    filler: TrainItem | None = None
    """A row that counts for nothing (see StepBatch); there where there are several processes."""
    saver: Saver = field(default_factory=Saver)
    saved_step: int | None = None
    """Step of the newest checkpoint, which may still be on its way to the disk."""
    cursor: Mapping[str, Any] | None = None
    """Where the data goes on after a resume, when that is not where the stream is: rows were drawn ahead."""
    loggers: Loggers = field(init=False)
    rollouts: RolloutWriter = field(init=False)
    health: Health = field(init=False)
    stack: ExitStack = field(default_factory=ExitStack)
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.loggers, self.health = Loggers(self.run), Health(self.run)
        keep, every = self.recipe.log.keep_rollouts, self.recipe.log.keep_rollouts_every
        self.rollouts = RolloutWriter(self.run, None if keep is None else RolloutRule(keep, every))

    @property
    def seconds(self) -> float:
        """Seconds of training over all attempts."""
        return self.progress.seconds + time.perf_counter() - self.started

    def log(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Write the numbers of a step to metrics.jsonl (of training: after its rollouts) and send them to the loggers.
        `kind`: train or validation.
        """
        if kind == "validation":
            self.health.note_validation(step, metrics)
        self.rollouts.log(step, kind, metrics)
        self.loggers.log(step, kind, metrics)
        for text in self.loggers.news():
            self.watcher.message(text)

    def close(self) -> None:
        self.rollouts.close()
        self.stack.close()


def open_sources(recipe: Recipe) -> tuple[list[Source], list[Source]]:
    """(training sources, validation sources) of a recipe; of the latter none where it does not validate.

    Raises: DataError and others as `open_source`; DataError when validation is on the test split without permission.
    """
    sources = [open_source(d, recipe.reward, scored=scores_responses(recipe)) for d in recipe.data]
    validates = recipe.data if recipe.eval.enabled else []
    found = [v for v in (open_validation(d, recipe.reward) for d in validates) if v is not None]
    for v in found:
        if v.split == "test" and not recipe.eval.allow_test_split:
            raise DataError(
                f"source `{v.name}` validates on its test split: choosing a checkpoint by it would spoil the test",
                hint="use a validation split, or set eval.allow_test_split = true (the run is then labelled)",
            )
    return sources, found


def open_session(
    recipe: Recipe, run: Run, runs_root: Path, watcher: Watcher, *, resume: Path | None = None, world: World = ALONE
) -> Session:
    """Load everything a run needs; with `resume`, continue exactly where that checkpoint was saved.

    With several processes each loads the whole model into main memory, then keeps its shard on its device.
    Raises: the errors of data, rewards, model and checkpoint; LaunchError for what cannot be sharded.
    """
    require_settled(recipe)
    check_sharing(recipe, world)
    torch.manual_seed(recipe.train.seed)
    if pick_device(recipe.model.device).type == "cpu":
        torch.set_num_threads(usable_cores())
    sources, validation = open_sources(recipe)
    if any(v.split == "test" for v in validation):
        run.add_label("validated on the test split")
    origin = origin_of(run, recipe.model.path, runs_root)
    # Resumed, nothing but the checkpoint is read, unless it holds an adapter: that needs its base model.
    start = origin if resume is None else replace(origin, checkpoint=resume)
    loading = recipe if world.size == 1 else on_cpu(recipe)
    model, processor, base = load_for_training(loading, start)
    temperature = recipe.rollout.temperature if recipe.kind == "rl" else 1.0
    algorithm = algorithm_of(recipe.algo) if recipe.kind == "rl" else None
    critic = algorithm is not None and algorithm.needs_critic
    policy = make_policy(recipe.model, model, processor, temperature, recipe.algo.entropy_coef != 0, critic)
    if resume is not None and policy.value_head is not None:
        policy.value_head.load_state_dict(io.load_value_head(resume))
    parts = trained_parts(model)
    watcher.message(f"{parts}{'; and a value head' if critic else ''}")
    if world.size > 1:
        watcher.message(shard_policy(policy, recipe, world))
    run.write_log(f"rows are run by: {policy.path}")
    if policy.sharing == "padded" and recipe.model.shared_prefix:
        watcher.message(f"no shared prefix: {policy.path}")
    encoder = make_encoder(recipe.model, processor)
    session = Session(
        recipe=recipe, run=run, policy=policy, processor=processor,
        optimizer=Optimizer(policy.model, recipe.optim, policy.value_head, policy.saved_dtypes),
        encoder=encoder, sources=sources, validation=validation,
        stream=PromptStream([len(s.rows) for s in sources], [s.share for s in sources], recipe.train.seed),
        scorers={}, origin=origin, watcher=watcher, base=base, world=world,
        filler=None if world.size == 1 else make_filler(encoder, stop_ids_of(model, processor.tokenizer)[0]),
        saver=Saver.of(recipe.checkpoint.asynchronous, policy.device, world),
    )  # fmt: skip
    for source in [*sources, *validation]:
        if source.name not in session.scorers:
            session.scorers[source.name] = session.stack.enter_context(make_scorer(source, recipe))
    if algorithm is not None and algorithm.kl_coef > 0:
        session.reference = _reference(session, temperature)
    if world.size > 1:  # adapters and heads were the same on all until here; dropout is every process's own
        torch.manual_seed(hash64(recipe.train.seed, "rank", world.rank))
    if resume is not None:
        restore(session, resume)
    run.event(session.progress.step, "parts", trained=dict(parts.trained), frozen=dict(parts.frozen))
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
        several = session.world.size > 1
        model, processor, _ = load_for_training(on_cpu(recipe) if several else recipe, origin)
        reference = make_policy(recipe.model, model.requires_grad_(False), processor, temperature)
        if several:
            shard_policy(reference, recipe, session.world)
        return reference
    if origin.checkpoint is None or saved_lora(origin.checkpoint) is None:
        return ReferencePolicy(session.policy)
    check_files(origin.checkpoint, ADAPTER)
    return ReferencePolicy(session.policy, read_adapter(origin.checkpoint / ADAPTER))


def restore(session: Session, folder: Path) -> None:
    """Put a checkpoint's optimizer, data position, counters and random state into the session, whose policy has the
    checkpoint's weights already.
    """
    optimizer = session.optimizer
    tensors = io.load_optimizer_tensors(folder, optimizer.masters)
    optimizer.load_state_tensors(tensors, read_meta(folder)["optimizer_updates"])
    data = io.load_data(folder)
    session.progress = Progress(**data["progress"]).begun_anew(session.run.manifest)
    session.saved_step = session.progress.step
    _count_late_validation(session)
    session.counted_before = (session.progress.samples, session.progress.reward_errors)
    for note in session.stream.adopt(data["stream"]):
        session.watcher.message(note)
    io.load_rng(folder, session.world)


def _count_late_validation(session: Session) -> None:
    """The validation that ends a run comes after the checkpoint of its step was saved: resumed, it counts."""
    progress = session.progress
    if 0 <= progress.validated < progress.step:
        line = next((n for n in session.run.metrics("validation") if n["step"] == progress.step), None)
        if line is not None:
            progress.count_validation(line["eval/metric"], session.recipe.eval.goal)


def draw_rows(session: Session, count: int) -> Sequence[tuple[Source, Any, int]]:
    """The next rows of the mixed stream: (source, row, occurrence)."""
    return [
        (session.sources[s], session.sources[s].rows[r], occurrence) for s, r, occurrence in session.stream.next(count)
    ]
