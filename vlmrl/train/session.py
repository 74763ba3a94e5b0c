"""Session of a training run: its parts, the code that builds them at its start, and the sharding with FSDP2.

One part is the saver, which runs the writing of a checkpoint: by the training itself, or by a thread from copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from PIL import Image
from torch import nn

from vlmrl.algo.algo_keys import Algorithm
from vlmrl.algo.algorithms import algorithm_of
from vlmrl.checkpoint import io
from vlmrl.checkpoint.io import check_files
from vlmrl.checkpoint.load import saved_lora
from vlmrl.data.chat_template import IMAGE_SLOT
from vlmrl.data.encode import Encoder
from vlmrl.dist.fsdp import HostCopies, allocate, own_part, own_rows, shard
from vlmrl.dist.world import ALONE, World, group_of_one
from vlmrl.errors import LaunchError
from vlmrl.model.families import sharded_units
from vlmrl.model.load import DTYPES, pick_device, require_same_tokenizer, stop_ids_of
from vlmrl.model.lora import read_adapter, trained_parts
from vlmrl.model.packing import PromptTokens, TrainItem
from vlmrl.model.policy import Policy
from vlmrl.model.safetensors_blocks import is_finite, non_finite
from vlmrl.model.stored_weights import StoredWeight, stored_weight, why_loaded_whole
from vlmrl.recipe.auto_values import require_filled
from vlmrl.recipe.rules.engine import check_trainers, is_sharded
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.schema import Teacher as TeacherSettings
from vlmrl.redaction.redact import excerpt
from vlmrl.rewards.attempts import AttemptRule
from vlmrl.rewards.base import ServicePlace
from vlmrl.rewards.scoring import Scorer
from vlmrl.rollout.sample import ranks_of
from vlmrl.setup.demonstrations import read_book, told_count
from vlmrl.setup.model import (
    load_for_training,
    make_encoder,
    make_policy,
    sampling_params,
    set_allocator,
    setting_params,
)
from vlmrl.setup.model_origin import ModelOrigin, find_model, origin_of
from vlmrl.setup.sources import EvalSet, label_of, make_scorer, open_eval_sets, open_training
from vlmrl.store.checkpoints import ADAPTER
from vlmrl.store.provenance import usable_threads
from vlmrl.store.prune import RolloutRule
from vlmrl.store.runs import Run
from vlmrl.tasks.prompt import render_revealed
from vlmrl.tasks.source import PromptStream, Source
from vlmrl.train.collect import PromptFeed
from vlmrl.train.demonstrations import Demonstrator, add_demonstrations
from vlmrl.train.journal import Journal, Loggers, Progress, RolloutWriter, Watcher
from vlmrl.train.learner import Learner, Optimizer, ReferencePolicy, TokenBudgets, report_halved
from vlmrl.train.step_batch import FILLER
from vlmrl.train.teacher import Teacher
from vlmrl.types import Media, Message, Row, Segment, hash64

FILLER_SIDE = 56
"""Side of the filler's square image in pixels, before the processor resizes it."""


def check_sharing(recipe: Recipe, world: World) -> None:
    """Raise a LaunchError if the recipe's policy is sharded (`is_sharded`), but cannot be."""
    for unfit in check_trainers(recipe, world.size):
        raise LaunchError(unfit.message, hint=unfit.hint)


def on_cpu(recipe: Recipe) -> Recipe:
    """Return the recipe with a model that loads into main memory, as far as it is loaded before it is sharded."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"device": "cpu"})})


def shard_policy(policy: Policy, recipe: Recipe, world: World) -> str:
    """Shard a policy. Read this rank's rows of weights that are still in files; the others are in main memory.

    Returns: a description of the sharding, for the user.
    Raises: CheckpointError on all ranks when a weight is not finite.
    """
    device, dtype = pick_device(recipe.model.device), DTYPES[recipe.model.dtype]
    settings = recipe.parallel
    # Sharded parameters that are trained become float32; a checkpoint saves them in the dtype that they had.
    policy.saved_dtypes = {
        n: p.dtype for n, p in policy.model.named_parameters() if p.requires_grad and p.dtype != torch.float32
    }
    stored = {n: w for n, p in policy.model.named_parameters() if (w := stored_weight(p)) is not None}
    shard(
        policy,
        sharded_units(policy.model, policy.sharing),
        world,
        device,
        repeated=policy.sharing != "packed",
        compute_dtype=None if recipe.model.dtype == "float32" else dtype,
        group_size=settings.shard_size,
        offload=settings.offload,
        exact=[] if policy.value_head is None else [policy.value_head],
    )
    policy.device, policy.dtype = device, dtype
    if stored:
        allocate(policy, torch.device("cpu") if settings.offload else device)
        read_own_rows(policy.model, stored, world)
    reason = why_loaded_whole(policy.model)
    whole = f"; each process loaded the whole model first, because {reason}" if reason else ""
    if world.size == 1:
        return f"weights, gradients and moments are in main memory between their uses{whole}"
    size = settings.shard_size or world.size
    copies = f", {world.size // size} copies of the model" if size < world.size else ""
    offloaded = ", in main memory between uses" if settings.offload else ""
    return f"sharded over {size} processes{copies}{offloaded}{whole}"


@torch.no_grad()
def read_own_rows(model: nn.Module, stored: Mapping[str, StoredWeight], world: World) -> None:
    """Read this rank's rows of a sharded model from files.

    Args:
        stored: name of a parameter -> its weight in files.
    Raises: CheckpointError on all ranks when a weight is not finite.
    """
    not_finite = set()
    for name, parameter in model.named_parameters():
        if name not in stored:
            continue
        (first, last), part = own_rows(parameter), own_part(parameter.detach())
        for start, rows in stored[name].blocks(first, last):
            part[start - first : start - first + len(rows)].copy_(rows)
            if not is_finite(rows):
                not_finite.add(name)
    if any_rank := set().union(*world.gather(not_finite)):
        source = next(iter(stored.values())).source
        raise non_finite([n for n in stored if n in any_rank], source)


def make_filler(encoder: Encoder, stop_id: int) -> TrainItem:
    """Return a trajectory without loss: a blank image, and a response that ends at once."""
    picture = Image.new("RGB", (FILLER_SIDE, FILLER_SIDE))
    row = Row("filler", "filler", "filler", {}, (Media("filler", FILLER_SIDE, FILLER_SIDE),))
    prompt = encoder.encode(row, [Message("user", IMAGE_SLOT)], [picture])
    return TrainItem(PromptTokens.of(prompt), FILLER, (Segment("assistant", (stop_id,), True),), FILLER)


@dataclass(frozen=True)
class Written:
    """Complete checkpoint on disk.

    Args:
        keep: steps of other checkpoints that must not be removed (the best one), when this one was begun.
    """

    step: int
    folder: Path
    keep: Sequence[int]


@dataclass
class Saver:
    """Writer of a run's checkpoints, one at a time.

    Args:
        world: the ranks, in the process group that the writing threads use.
        copies: memory that tensors are copied to before a thread writes them; None = no thread and no copies.
        on_complete: called with each checkpoint when it is complete and `finish_save` has waited for it.
        saved_step: step of the newest checkpoint, which may not be complete yet; None = there is none.
        proof_items: trajectories of the newest step; the next checkpoint holds log-probs of some as its proof.
        under_way: checkpoint that was begun, until `result` is called; None = there is none. Known on all ranks.
    """

    world: World = ALONE
    copies: HostCopies | None = None
    on_complete: Callable[[Written], None] = lambda written: None
    saved_step: int | None = None
    proof_items: Sequence[TrainItem] = ()
    under_way: Future[Written] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        asynchronous: bool | None,
        device: torch.device,
        world: World,
        on_complete: Callable[[Written], None] = lambda written: None,
    ) -> Saver:
        """Return the saver for a recipe's `checkpoint.asynchronous`; None = asynchronous on a GPU, else not.

        All ranks call it together.
        """
        on_gpu = device.type == "cuda"
        if not (on_gpu if asynchronous is None else asynchronous):
            return cls(world, None, on_complete)
        return cls(world.apart(), HostCopies(pinned=on_gpu), on_complete)

    @property
    def written(self) -> bool:
        """Return whether `result` would return at once."""
        return self.under_way is None or self.under_way.done()

    def begin(self, write: Callable[[], Written]) -> None:
        """Run `write`: with copies in a thread beside the training, else to its end before this returns."""
        assert self.under_way is None, "one checkpoint at a time"
        future = self.under_way = Future[Written]()

        def work() -> None:
            try:
                future.set_result(write())
            except BaseException as error:
                future.set_exception(error)

        if self.copies is None:
            work()
        else:  # daemon thread: an abrupt exit leaves the checkpoint incomplete, as a kill does
            Thread(target=work, name="checkpoint", daemon=True).start()

    def result(self) -> Written:
        """Wait for the checkpoint that was begun, and return it, complete on disk.

        Raises: the errors of `write`.
        """
        assert self.under_way is not None
        future, self.under_way = self.under_way, None
        return future.result()


def keep_newest(run: Run, keep_last: int, written: Written) -> None:
    """Remove the old checkpoints that the recipe does not keep, and write the event of the new one."""
    run.prune_checkpoints(keep_last, written.keep)
    run.event(written.step, "checkpoint saved", folder=written.folder.name)


@dataclass(frozen=True)
class Session:
    """All parts of a training run.

    Only the two loops and the functions that open, save and restore a run take the whole session. All others take the
    part that they use.

    Args:
        base: path and revision of the first weights; with an adapter, those of the model below the adapter, with its
            checksum.
        stack: closes the reward workers, the engine, and the process group of a single rank.
    """

    recipe: Recipe
    learner: Learner
    feed: PromptFeed
    journal: Journal
    saver: Saver
    origin: ModelOrigin
    base: Mapping[str, Any]
    stack: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Write the last rollouts, then end what `stack` closes."""
        self.journal.rollouts.close()
        self.stack.close()


def open_session(
    recipe: Recipe,
    run: Run,
    runs_root: Path,
    watcher: Watcher,
    loggers: Loggers,
    progress: Progress,
    *,
    resume: Path | None = None,
    world: World = ALONE,
) -> Session:
    """Load everything that a run needs, with the weights of the checkpoint `resume` if there is one.

    `checkpointing.restore` then loads the other states of that checkpoint.

    The weights of a policy that is sharded stay in their files until it is sharded. Then each rank reads its shards, to
    its device or to main memory.

    Raises: the errors of data, rewards, model and checkpoint; LaunchError for what cannot be sharded.
    """
    require_filled(recipe)
    check_sharing(recipe, world)
    _prepare_torch(recipe, run)
    # Data and model.
    sources, validation = open_training(recipe), open_eval_sets(recipe)
    if label := label_of(validation):
        run.add_label(label)
    origin = origin_of(run, recipe.model.path, runs_root)
    # On resume the weights come from the checkpoint alone, unless it holds an adapter: that needs its base model, too.
    start = origin if resume is None else replace(origin, checkpoint=resume)
    sharded = is_sharded(recipe, world.size)
    model, processor, base = _load(recipe, start, world)
    algorithm = algorithm_of(recipe.algo) if recipe.kind == "rl" else None
    temperature = recipe.rollout.temperature if recipe.kind == "rl" else 1.0
    critic = algorithm is not None and algorithm.needs_critic
    entropy = recipe.algo.entropy_coef != 0 or (algorithm is not None and algorithm.masks_both)
    policy = make_policy(recipe.model, model, processor, temperature, entropy, critic)
    if resume is not None and policy.value_head is not None:
        policy.value_head.load_state_dict(io.load_value_head(resume))
    parts = trained_parts(model)
    watcher.message(f"{parts}{'; and a value head' if critic else ''}")
    stack = ExitStack()
    if sharded:
        stack.enter_context(group_of_one(pick_device(recipe.model.device).type))
        sharding = shard_policy(policy, recipe, world)
        watcher.message(sharding)
        run.write_log(sharding)
    run.write_log(f"packed rows are run by: {policy.path}")
    if policy.sharing == "padded" and recipe.model.shared_prefix:
        watcher.message(f"no shared prefix: {policy.path}")
    # The parts of the session: journal, learner, saver, feed.
    encoder = make_encoder(recipe.model, processor)
    keep, every = recipe.log.keep_rollouts, recipe.log.keep_rollouts_every
    rollouts = RolloutWriter(run, None if keep is None else RolloutRule(keep, every))
    journal = Journal(run, watcher, progress, loggers, rollouts, world)
    learner = Learner(
        recipe,
        policy,
        Optimizer(policy.model, recipe.optim, policy.value_head, policy.saved_dtypes),
        TokenBudgets(recipe, progress, partial(report_halved, journal, policy.device)),
        world=world,
    )
    stream = PromptStream([len(s.rows) for s in sources], [s.share for s in sources], recipe.train.seed)
    if world.size > 1:  # ranks with fewer packed rows than others run the filler, so that all run the same number
        learner.filler = make_filler(encoder, stop_ids_of(policy.model, processor.tokenizer)[0])
    saver = Saver.of(
        recipe.checkpoint.asynchronous, policy.device, world, partial(keep_newest, run, recipe.checkpoint.keep_last)
    )
    scorers = _open_scorers(recipe, sources, validation, ServicePlace(str(run.dir)), stack)
    named_settings = recipe.eval.named_settings
    feed = PromptFeed(
        recipe,
        sources,
        validation,
        stream,
        encoder,
        scorers,
        sampling_params(recipe, policy, processor.tokenizer),
        {name: setting_params(recipe, policy, processor.tokenizer, s) for name, s in named_settings.items()},
        world,
        rule=AttemptRule(recipe.reward.outage, recipe.reward.outage_minutes),
        ranks=ranks_of(world, watcher.message),
    )
    session = Session(recipe, learner, feed, journal, saver, origin, base, stack)
    if algorithm is not None:
        _add_others(session, algorithm)
    if world.size > 1:
        # One seed until here: adapters and value heads start equal on all ranks. From here each has its own dropout.
        torch.manual_seed(hash64(recipe.train.seed, "rank", world.rank))
    run.event(progress.step, "parts", trained=dict(parts.trained), frozen=dict(parts.frozen))
    return session


def _prepare_torch(recipe: Recipe, run: Run) -> None:
    """Set the seed, the CPU's threads and the GPU's allocator, before the first tensor is made."""
    device = pick_device(recipe.model.device)
    if allocator := set_allocator(recipe, device):
        run.write_log(f"CUDA allocator: {allocator}")
    torch.manual_seed(recipe.train.seed)
    if device.type == "cpu":
        torch.set_num_threads(usable_threads())


def _open_scorers(
    recipe: Recipe, sources: Sequence[Source], validation: Sequence[EvalSet], place: ServicePlace, stack: ExitStack
) -> dict[str, Scorer]:
    """Return the scorers of the sources by name: training and validation share them. `stack` closes them."""
    scorers: dict[str, Scorer] = {}
    for source in [*sources, *(source for one in validation for source in one.sources)]:
        if source.name not in scorers:
            scorers[source.name] = stack.enter_context(make_scorer(source, recipe, place))
    return scorers


def _load(recipe: Recipe, origin: ModelOrigin, world: World) -> tuple[Any, Any, dict[str, Any]]:
    """Load the model as `load_for_training` does. The weights of one that is sharded stay in their files."""
    if is_sharded(recipe, world.size):
        return load_for_training(on_cpu(recipe), origin, world)
    return load_for_training(recipe, origin)


def _add_others(session: Session, algorithm: Algorithm) -> None:
    """Add what an algorithm learns from beside its samples: demonstrations, a reference, a teacher."""
    recipe, learner, feed, journal = session.recipe, session.learner, session.feed, session.journal
    say = journal.watcher.message
    if algorithm.demonstrations != "none":
        runs = journal.run.dir.parent
        books = {s.name: read_book(s, d, runs) for s, d in zip(feed.sources, recipe.data, strict=True)}
        for source in feed.sources:
            if (book := books[source.name]) is not None:
                say(f"demonstrations of {source.name}: {told_count(source, book)}")
        first = journal.progress.step
        demonstrator = Demonstrator(books, feed.encoder, feed.sampling, recipe.train.seed, first, say)
        feed.hint = partial(demonstrator.hinted, algorithm)
        feed.demonstrate = partial(add_demonstrations, feed, demonstrator, algorithm)
    if algorithm.kl_coef > 0:
        learner.reference = _load_reference(recipe, learner.policy, session.origin, learner.world)
    if algorithm.teacher != "none" and recipe.teacher is not None:
        learner.teacher = _load_teacher(session, recipe.teacher, algorithm)
        path = recipe.teacher.path if recipe.teacher.is_start else recipe.teacher.checkpoint
        say(f"teacher: {'the policy as the run began' if recipe.teacher.is_start else path}")
        journal.run.event(journal.progress.step, "teacher", path=path)


def _load_teacher(session: Session, settings: TeacherSettings, algorithm: Algorithm) -> Teacher:
    """Return the frozen teacher of a recipe, sharded like the policy.

    Raises: the errors of the model; RecipeError when it has another tokenizer, or for an invalid `teacher.reveal`.
    """
    recipe, learner, feed = session.recipe, session.learner, session.feed
    if settings.reveal is not None:  # a template that fails is told before the first step
        for source in feed.sources:
            text = render_revealed(settings.reveal, source.rows[0], source.task.variables, hides=settings.control)
            session.journal.watcher.message(
                f"the teacher alone reads, for {source.rows[0].place}: {excerpt(text, 200, mark='...')}"
            )
    sources = {source.name: source for source in feed.sources}
    world = learner.world
    if (model_settings := recipe.teacher_model) is None:
        policy = learner.reference or _load_reference(recipe, learner.policy, session.origin, world)
        return Teacher(policy, feed.encoder, sources, feed.with_changed, algorithm, settings, learner.filler)
    own = recipe.model_copy(update={"model": model_settings, "lora": None})
    model, processor, _ = _load(own, find_model(model_settings.path, Path()), world)
    require_same_tokenizer(feed.encoder.tokenizer, processor.tokenizer, settings.path)
    temperature = settings.temperature or recipe.rollout.temperature
    policy = make_policy(model_settings, model.requires_grad_(False), processor, temperature)
    # What the policy never samples, and the rows that pad the teacher's larger embedding.
    mine, theirs = (m.get_input_embeddings().weight.shape[0] for m in (learner.policy.model, model))
    policy.banned_ids = (*learner.policy.banned_ids, *range(mine, theirs))
    if is_sharded(recipe, world.size):
        shard_policy(policy, own, world)
    encoder = make_encoder(model_settings, processor)
    encoder.require_template()
    filler = None if learner.filler is None else make_filler(encoder, feed.sampling.stop_ids[0])
    return Teacher(policy, encoder, sources, feed.with_changed, algorithm, settings, filler)


def _load_reference(recipe: Recipe, policy: Policy, origin: ModelOrigin, world: World) -> Policy | ReferencePolicy:
    """Return the reference of the KL term: the weights that the run began with, frozen.

    It is a second model. With an adapter it is the policy's own model, with the first adapter or with none.
    """
    if recipe.lora is None:
        model, processor, _ = _load(recipe, origin, world)
        reference = make_policy(recipe.model, model.requires_grad_(False), processor, recipe.rollout.temperature)
        if is_sharded(recipe, world.size):
            shard_policy(reference, recipe, world)
        return reference
    if origin.checkpoint is None or saved_lora(origin.checkpoint) is None:
        return ReferencePolicy(policy)
    check_files(origin.checkpoint, ADAPTER)
    return ReferencePolicy(policy, read_adapter(origin.checkpoint / ADAPTER))
