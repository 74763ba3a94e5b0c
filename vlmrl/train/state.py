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
from vlmrl.checkpoint.checked_files import check_files
from vlmrl.checkpoint.format import ADAPTER
from vlmrl.checkpoint.load import saved_lora
from vlmrl.data.encode import Encoder
from vlmrl.data.packing import TrainItem
from vlmrl.data.sampler import PromptStream
from vlmrl.dist.world import ALONE, World
from vlmrl.model.load import pick_device, stop_ids_of
from vlmrl.model.lora import read_adapter, trained_parts
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.settle import require_settled
from vlmrl.rewards.scorer import Scorer
from vlmrl.setup.model import load_for_training, make_encoder, make_policy
from vlmrl.setup.model_origin import ModelOrigin, origin_of
from vlmrl.setup.sources import make_scorer, open_sources
from vlmrl.store.checkpoints import read_meta
from vlmrl.store.provenance import usable_cores
from vlmrl.store.prune import RolloutRule
from vlmrl.store.runs import Run
from vlmrl.tasks.source import Source
from vlmrl.train.checkpointing import Saver
from vlmrl.train.health import Health
from vlmrl.train.loggers import Loggers
from vlmrl.train.optim import Optimizer
from vlmrl.train.progress import Progress
from vlmrl.train.reference import ReferencePolicy
from vlmrl.train.rollout_writer import RolloutWriter
from vlmrl.train.sharding import check_sharing, make_filler, on_cpu, shard_policy
from vlmrl.types import Group, hash64


class Watcher(Protocol):
    """Who is told what happens: the console. All methods return at once and never raise."""

    def message(self, text: str) -> None: ...
    def generated(self, done: int, total: int) -> None: ...
    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None: ...
    def validation(self, step: int, summary: Mapping[str, Any], best: bool) -> None: ...
    def sample(self, step: int, group: Group) -> None: ...


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
