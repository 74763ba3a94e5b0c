"""Supervised fine-tuning: the same `update()` as reinforcement learning, cross-entropy on the rows' own responses."""

from __future__ import annotations

import random
from functools import partial

from vlmrl.data.packing import PromptTokens, TrainItem
from vlmrl.errors import DataError
from vlmrl.model.load import stop_ids_of
from vlmrl.rollout.sample import encode_prompt
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.tasks.source import Source
from vlmrl.train.loop import Clock, after_step, catch_interrupt, end, memory_metrics, stop_reason, validate_at_start
from vlmrl.train.objectives import CrossEntropy
from vlmrl.train.optim import learning_rate
from vlmrl.train.out_of_memory import budget_metrics, in_rows, keep_batches
from vlmrl.train.rehearsal import rehearse
from vlmrl.train.state import Session, draw_rows
from vlmrl.train.step_batch import StepBatch
from vlmrl.train.update import update
from vlmrl.types import Row, Segment, hash64, name_row

RESPONSE_COLUMN = "response"


def train_sft(session: Session) -> str:
    """Train until the recipe's end. Returns the run's status: done or interrupted. One pass = one optimizer step."""
    s, recipe = session, session.recipe
    generator = TorchEngine(s.policy, s.processor.tokenizer, batch_tokens=recipe.rollout.batch_tokens)
    keep_batches(s, generator)
    rehearse(s, CrossEntropy(), partial(_item, s), lambda source, row: target_text(source, row, random.Random(0)))
    generator.load_weights(s.progress.step)
    with catch_interrupt(s) as request:
        validate_at_start(s, generator)
        while (reason := stop_reason(s, request)) is None:
            step, clock = s.progress.step, Clock()
            with clock("encode"):
                drawn = draw_rows(s, recipe.train.rows_per_step)
                items = [_item(s, *drawn[index], index) for index in s.world.mine(len(drawn))]
            names = [name_row(source.name, row.prompt_id) for source, row, _ in drawn]
            batch = StepBatch(items, [0.0] * len(drawn), names, world=s.world, filler=s.filler)
            with clock("update"):
                lr = learning_rate(recipe.optim, step, recipe.train.steps)
                rest = {"lr": lr, "max_tokens": recipe.rollout.max_new_tokens}
                stats = in_rows(s, partial(update, s.policy, s.optimizer, batch, CrossEntropy(), **rest))
            s.proof_items = items
            s.progress.step += 1
            s.progress.samples += len(drawn)
            generator.load_weights(s.progress.step)
            tokens = sum(s.world.gather(sum(batch.num_trained(i) for i in items)))
            metrics = stats | {
                "optim/updates": s.optimizer.updates, "data/rows": len(drawn), "data/trained_tokens": tokens,
                "rollout/tokens_per_second": tokens / clock.metrics()["time/step_seconds"],
            } | clock.metrics() | memory_metrics(s) | budget_metrics(s)  # fmt: skip
            s.log(step, "train", metrics)
            s.watcher.step(step, recipe.train.steps, metrics)
            after_step(s, generator)
        return end(s, generator, reason)


def _item(session: Session, source: Source, row: Row, occurrence: int, index: int) -> TrainItem:
    prompt = encode_prompt(source, row, occurrence, session.encoder, session.recipe.rollout.max_prompt_tokens)
    text = target_text(source, row, random.Random(hash64(session.recipe.train.seed, row.prompt_id, occurrence)))
    ids = response_ids(session, text)
    return TrainItem(PromptTokens.of(prompt.encoded), index, (Segment("assistant", ids, True),), index)


def target_text(source: Source, row: Row, rng: random.Random) -> str:
    """The response to learn: the row's `response` column where it has one, else the task's own trace.

    Raises: DataError when there is neither.
    """
    given = row.columns.get(RESPONSE_COLUMN)
    if isinstance(given, str) and given:
        return given
    if source.task.trace is None:
        raise DataError(
            f"task `{source.task.name}` has no templated traces and the row has no `{RESPONSE_COLUMN}` column",
            where=row.place,
            hint=f'add a column `{RESPONSE_COLUMN}`, or name yours: columns = {{ response = "..." }} in [[data]]',
        )
    return source.task.trace(row, rng)


def response_ids(session: Session, text: str) -> tuple[int, ...]:
    """Token ids of a response and its end token, the last that is trained. Control tokens typed in it are letters."""
    tokenizer = session.processor.tokenizer
    ids = session.encoder.encode_text(text)
    end_id = tokenizer.eos_token_id
    stops = stop_ids_of(session.policy.model, tokenizer)
    return (*ids, end_id if end_id is not None else stops[0])
