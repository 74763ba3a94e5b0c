"""Demonstrations of a step: responses of others, scored like the policy's and trained on beside them.

A demonstration is the `response` of a row or a trace of its task, as for supervised learning, or a response from a
table or from another run. `Group.demonstrations` keeps them apart from the samples, so no metric of the policy counts
them. A hint is the beginning of one, in front of what the policy writes: a segment of the response by another author.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from vlmrl.algo.algorithms import Algorithm
from vlmrl.algo.credit import solved
from vlmrl.data.encode import Encoder
from vlmrl.errors import DataError
from vlmrl.rollout.sample import Hint, Prompt, Rollout, scored_groups, submit
from vlmrl.setup.demonstrations import Book, has_own
from vlmrl.tasks.source import Source, accuracies
from vlmrl.train.collect import Collected, PromptFeed
from vlmrl.train.targets import target_turns, turn_ids
from vlmrl.types import Group, Message, Sample, SamplingParams, Segment, hash64

NAMED = 5
"""Number of rows whose demonstration is too long that are named in an attempt."""


@dataclass
class Demonstrator:
    """Finds the demonstration of a prompt.

    Args:
        books: name of a source -> its demonstrations; None = it has none.
        sampling: sampling parameters of training, which bound a demonstration, too.
        first_step: of this attempt.
        long: (attribute) rows whose demonstration is longer than a response may be.
    """

    books: Mapping[str, Book | None]
    encoder: Encoder
    sampling: SamplingParams
    seed: int
    first_step: int = 0
    say: Callable[[str], Any] = lambda text: None
    long: set[str] = field(default_factory=set)

    def ids_of(self, prompt: Prompt) -> tuple[str, tuple[int, ...]] | None:
        """Return the text and the token ids of a prompt's demonstration, end token included; None if it has none.

        One that is longer than `rollout.max_new_tokens` is left out, and its row is named once.

        Raises: DataError when it cannot be encoded.
        """
        source, row = prompt.source, prompt.row
        book = self.books.get(row.source)
        rng = random.Random(hash64(self.seed, row.prompt_id, prompt.occurrence, "demonstration"))
        if book is None or rng.random() >= book.share:
            return None
        assert isinstance(source, Source)
        if book.texts is not None:
            if (text := book.texts.get(row.prompt_id)) is None:
                return None
            parts: Sequence[Any] = (text,)
        elif not has_own(source, row):
            return None
        else:
            turns = target_turns(source, row, rng, prompt.encoded.seen_sizes)
            if len(turns) != 1 or isinstance(turns[0], Message):
                raise DataError("its demonstration has several turns", where=row.place, hint="give it one `response`")
            parts = turns[0]
        ids = turn_ids(self.encoder, self.sampling, prompt, parts)
        if len(ids) > self.sampling.max_new_tokens:
            if row.prompt_id not in self.long and len(self.long) <= NAMED:
                self.long.add(row.prompt_id)
                text = "more of them are not named" if len(self.long) > NAMED else "it is left out"
                self.say(
                    f"{row.place}: its demonstration has {len(ids)} tokens, more than rollout.max_new_tokens = "
                    f"{self.sampling.max_new_tokens}; {text}"
                )
            return None
        return "".join(map(str, parts)), ids

    def sample_of(self, prompt: Prompt, version: int) -> Sample | None:
        """Return a prompt's demonstration as a response; None if it has none."""
        if (shown := self.ids_of(prompt)) is None:
            return None
        text, ids = shown
        segments = (Segment("assistant", ids, True, author="demonstration"),)
        return Sample(ids, text, (math.nan,) * len(ids), "stop", version, 0, segments)

    def hinted(self, algorithm: Algorithm, prompt: Prompt, step: int) -> Prompt:
        """Return a prompt with the beginning of its demonstration as a hint, if the algorithm gives hints.

        Its share of the demonstration is drawn, from 0 to that of the step.
        """
        most = algorithm.hint_share_at(step) if algorithm.demonstrations == "hint" else 0.0
        if most <= 0 or (shown := self.ids_of(prompt)) is None:
            return prompt
        _, ids = shown
        rng = random.Random(hash64(self.seed, prompt.row.prompt_id, prompt.occurrence, "hint"))
        count = min(len(ids) - 1, int(rng.uniform(0.0, most) * len(ids)))
        text = self.encoder.tokenizer.decode(ids[:count], skip_special_tokens=True)
        while count and text.endswith("\ufffd"):  # the token ends within a character
            count -= 1
            text = self.encoder.tokenizer.decode(ids[:count], skip_special_tokens=True)
        return replace(prompt, hint=Hint(ids[:count], text)) if count else prompt


def add_demonstrations(
    feed: PromptFeed, demonstrator: Demonstrator, algorithm: Algorithm, collected: Collected, step: int, strict: bool
) -> None:
    """Add the demonstrations of a step to its groups, scored by their source's reward. All ranks call it together.

    Raises: as `ScoringSession.collect`.
    """
    if algorithm.demonstrations != "hint":
        rollouts: dict[int, Rollout] = {}
        if algorithm.demonstrations == "failed" or algorithm.weighs_by_entropy:  # others need no accuracy here
            collected.solved = solved(collected.groups, accuracies(collected.groups, feed.sources))
        for i, prompt in collected.sampled():
            if algorithm.demonstrations == "failed" and sum(collected.solved[i]) > algorithm.most_solved:
                continue
            if sample := demonstrator.sample_of(prompt, step):
                rollouts[i] = Rollout(prompt, (sample,), 0.0)
        with feed.scoring(strict=strict) as session:
            for number, rollout in enumerate(rollouts.values()):
                submit(session, number, rollout)
            scored = [group.samples[0] for group in scored_groups(session, list(rollouts.values()))]
        collected.add_wait(session)
        # Images that the reward made of a demonstration are not kept.
        own = {
            i: replace(s, score=replace(s.score, artifacts={}, files={})) for i, s in zip(rollouts, scored, strict=True)
        }
        for i, sample in (pair for of_rank in feed.world.gather(own) for pair in of_rank.items()):
            group = collected.groups[i]
            trajectory = replace(sample.trajectory, sample=len(group.samples))
            collected.groups[i] = replace(group, demonstrations=(replace(sample, trajectory=trajectory),))
    collected.metrics |= demonstration_metrics(collected.groups)
    if not collected.metrics["demonstration/share"] and step == demonstrator.first_step:
        demonstrator.say("no prompt of this step has a demonstration: the step learns from its samples alone")
    if (mu := algorithm.mu_at(step)) is not None:
        collected.metrics["demonstration/mu"] = mu


def demonstration_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the share of the prompts with a demonstration or a hint, and the mean score and length of these."""
    shown = [s for g in groups for s in g.demonstrations]
    hints = [t.segments[0] for g in groups for t in g.trajectories[:1] if t.segments[0].author == "demonstration"]
    metrics = {"demonstration/share": (len(hints) + sum(bool(g.demonstrations) for g in groups)) / max(1, len(groups))}
    if lengths := [*(s.trajectory.num_trained_tokens for s in shown), *(len(hint.ids) for hint in hints)]:
        metrics["demonstration/tokens_mean"] = fmean(lengths)
    if scores := [s.score.value for s in shown if s.score.error is None]:
        metrics["demonstration/score_mean"] = fmean(scores)
    return metrics
