"""Service of a judge: judgements for pairs of pictures, for rewards that call it from several threads and processes.

Each process has a service of its own; they share the file of judgements and the budget in it. A service has one thread
with an event loop. Every call is reserved in the budget before it is sent, so all attempts are made here.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from vlmrl.errors import RewardError, RewardUnavailable, VlmrlError
from vlmrl.services.calls import Attempts, Breaker, Budget, Called, Caller, Counters, Counting, Spent
from vlmrl.services.client import LoopThread, Pauses
from vlmrl.services.judge_database import JUDGEMENTS, FileThread, JudgementCache, StoredJudgements, request_key
from vlmrl.services.judge_prompt import JudgeRequest, make_chat, tiny_png
from vlmrl.services.judge_settings import JudgeSettings
from vlmrl.services.protocol import (
    BrokenAnswer,
    ChatAnswer,
    ChatRequest,
    EndpointDown,
    EndpointError,
    InvalidJudgement,
    JudgeDown,
    JudgeRejected,
    NoJudgement,
    NotInCache,
)
from vlmrl.services.providers import Provider, open_provider
from vlmrl.services.rubric import Judgement, Rubric, judgement_of, load_rubric
from vlmrl.services.shared_file import Database
from vlmrl.store.layout import JUDGE_FILE

HOLD_SECONDS = 60.0
"""Time beyond the limit of a call after which its reservation counts in full, in seconds."""
MOST_HOPELESS = 10_000
"""Number of requests without a judgement that are remembered: they are not sent again."""


@dataclass(frozen=True)
class Preflight:
    """Report of a call that tried the judge.

    Args:
        input_tokens, output_tokens: as the endpoint counts them; None = it does not say.
        cost: cost of the call by the prices of the settings; None = there are no prices, or no counts.
        judgement: its judgement on two equal pictures.
    """

    provider: str
    model: str
    address: str
    seconds: float
    input_tokens: int | None
    output_tokens: int | None
    cost: float | None
    judgement: Judgement


class JudgeService:
    """Judge for one process. Use it as a context manager; its methods may be called from any thread.

    Args:
        settings: the table `[judge]`.
        rubric: the rubric; None = that of the settings.
        base_dir: folder where relative paths of the settings start; None = the current one.
        account: name of what the budget counts together, such as the id of a run.
        offline: answer from stored judgements alone; no key is needed, and nothing is sent or written.
        also: further files of judgements, which are only read.
        notify: called, from any thread, with a line for the user.
        provider: sender of the chats; None = that of the settings.
        rng: source of the jitter.
    Raises: RecipeError for a rubric or a file that cannot be used; JudgeRejected for an address or a key that cannot be
        used.
    """

    def __init__(
        self,
        settings: JudgeSettings,
        *,
        rubric: Rubric | None = None,
        base_dir: Path | None = None,
        account: str = "default",
        offline: bool = False,
        also: Sequence[Path] = (),
        notify: Callable[[str], Any] = lambda text: None,
        provider: Provider | None = None,
        pauses: Pauses | None = None,
        breaker: Breaker | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.settings, self.offline = settings, offline
        self.rubric = rubric or load_rubric(settings.rubric, base_dir)
        self._secret = os.environ.get(settings.key_variable or "", "").strip()
        self._pid, self._rng, self._pauses = os.getpid(), rng or random.Random(), pauses or Pauses()
        self._breaker, self._counting, self._notify = breaker or Breaker(), Counting(), notify
        path = (base_dir or Path()) / (settings.cache or JUDGE_FILE) if settings.cache is not False else None
        written = None if offline else path
        self._database = Database(JUDGEMENTS, written, notify=notify)
        self._cache = JudgementCache(self._database, self.rubric) if written is not None else None
        files = [one for one in ([path] if offline else []) + list(also) if one is not None]
        self._stored = [StoredJudgements(one, self.rubric, notify) for one in files]
        self._budget = Budget(
            self._database,
            account=account,
            max_calls=settings.max_calls,
            max_cost=settings.max_cost,
            prices=settings.prices,
            hold_seconds=settings.timeout_seconds + HOLD_SECONDS,
        )
        self._file = FileThread()
        self._caller = None if offline else self._open_caller(provider)
        self._open: dict[str, asyncio.Task[Judgement]] = {}
        self._hopeless: OrderedDict[str, str] = OrderedDict()
        self._thread = LoopThread("judge")

    def _open_caller(self, provider: Provider | None) -> Caller:
        try:
            sender = provider or open_provider(self.settings)
        except VlmrlError as error:
            self._file.close()
            self._database.close()
            if not isinstance(error, EndpointError):
                raise
            raise JudgeRejected(error.message, where=error.where, hint=error.hint) from None
        return Caller(
            self.settings,
            sender,
            self._budget,
            file=self._file,
            breaker=self._breaker,
            pauses=self._pauses,
            rng=self._rng,
            counting=self._counting,
            notify=self._notify,
        )

    def __enter__(self) -> JudgeService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def counters(self) -> Counters:
        """Counts of this service."""
        return replace(self._counting.now(), opened=self._breaker.opened)

    def spent(self) -> Spent:
        """Return what all processes have spent on this account."""
        return self._budget.spent()

    def submit(self, requests: Sequence[JudgeRequest]) -> list[Future[Judgement]]:
        """Ask for judgements. Return one future per request, in order.

        Equal requests share one call. A future raises JudgeDown for an outage, NoJudgement for a request that the judge
        does not answer, NotInCache if offline, BudgetSpent (these are RewardUnavailable), or JudgeRejected for a
        mistake in the settings.

        Raises: RewardError if the service is closed, or in a process that was forked from the service's own.
        """
        self._check_alive()
        keys = [self.key_of(request) for request in requests]
        return [self._thread.run(self._shared(key, request)) for key, request in zip(keys, requests, strict=True)]

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement | RewardUnavailable]:
        """Ask for judgements and wait for all of them. Return one judgement per request, or why there is none.

        Raises: RewardError as `submit`; JudgeRejected for a mistake in the settings.
        """
        judgements: list[Judgement | RewardUnavailable] = []
        for future in self.submit(requests):
            try:
                judgements.append(future.result())
            except RewardUnavailable as error:
                judgements.append(error)
        return judgements

    def preflight(self) -> Preflight:
        """Try the judge with one small call, which the budget counts.

        Raises: JudgeRejected with what to do, when the key, the model or the address is wrong, or the model gives no
            judgement by the schema. JudgeDown or BudgetSpent.
        """
        self._check_alive()
        return self._thread.run(self._try()).result()

    def key_of(self, request: JudgeRequest) -> str:
        """Return the key of a request in the cache: a sha256 of all that its judgement depends on."""
        settings = self.settings
        parameters = settings.parameters()
        return request_key(request, self.rubric, provider=settings.provider, model=settings.name, parameters=parameters)

    def close(self) -> None:
        """Cancel what is in flight, and end the thread. A second call does nothing."""
        if os.getpid() != self._pid or not self._thread.is_open:
            return
        self._thread.close(self._end_calls)
        self._file.close()
        self._database.close()
        for stored in self._stored:
            stored.close()

    def _check_alive(self) -> None:
        if os.getpid() != self._pid:
            raise RewardError("a judge's service was used in a forked process", hint="make one in each process")
        if not self._thread.is_open:
            raise RewardError("a judge's service was used after it was closed")

    async def _end_calls(self) -> None:
        if self._caller is not None:
            await self._caller.close()

    async def _shared(self, key: str, request: JudgeRequest) -> Judgement:
        """Return the judgement of a request, of its own call or of that of an equal request in flight."""
        task = self._open.get(key)
        if task is None:
            task = asyncio.ensure_future(self._judgement(key, request))
            self._open[key] = task
            task.add_done_callback(lambda done: self._end(key, done))
        else:
            self._counting.add(deduped=1)
        return await asyncio.shield(task)

    def _end(self, key: str, task: asyncio.Task[Judgement]) -> None:
        self._open.pop(key, None)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, RewardUnavailable) or (error is None and task.result().is_outage):
            self._counting.add(unavailable=1)

    async def _judgement(self, key: str, request: JudgeRequest) -> Judgement:
        if self._cache is not None and (judgement := await self._file.run(self._cache.get, key)) is not None:
            self._counting.add(cached=1)
            return judgement
        for stored in self._stored:
            if (judgement := await self._file.run(stored.get, key)) is not None:
                self._counting.add(cached=1)
                return judgement
        if self._caller is None:
            raise NotInCache(
                "the judge is offline, and the judgement is not in its cache", hint="score once with the judge online"
            )
        if key in self._hopeless:
            raise NoJudgement(self._hopeless[key])
        try:
            return await self._ask(self._caller, key, request)
        except NoJudgement as error:
            self._hopeless[key] = error.message
            if len(self._hopeless) > MOST_HOPELESS:
                self._hopeless.popitem(last=False)
            raise
        except JudgeDown:
            if self.settings.outage != "zero":
                raise
            return Judgement(dict.fromkeys(self.rubric.names, 0.0), "the judge was down", is_outage=True)

    async def _ask(self, caller: Caller, key: str, request: JudgeRequest) -> Judgement:
        """Return the judgement of a request that the cache lacks, and keep it."""
        return await self._keep(key, *await self._answered(caller, key, request))

    async def _answered(
        self, caller: Caller, key: str, request: JudgeRequest, *, is_trial: bool = False
    ) -> tuple[Judgement, Called]:
        """Return the judgement of a request and its call, after as many calls as the settings allow.

        A trial does not wait for the end of an outage. It is not repeated where nobody answers: the address may be
        wrong.
        """
        settings = self.settings.model_copy(update={"outage": "mask"}) if is_trial else self.settings
        attempts, invalid, is_first = Attempts(settings, self._pauses, self._rng), 0, True
        while True:
            failure = None
            try:
                called = await caller.call(self._chat(key, request, again=invalid > 0), is_first=is_first)
                if called is not None:
                    return self._read(called.answer), called
            except InvalidJudgement as error:
                invalid, is_first = invalid + 1, False
                self._counting.add(invalid=1)
                if invalid >= settings.attempts:
                    what = f"{invalid} answers had no judgement, the last one: {error.message}"
                    raise NoJudgement(f"the judge gave no judgement: {what}", hint=error.hint) from None
                continue
            except (EndpointDown, BrokenAnswer) as error:
                failure, is_first = error, False
                if is_trial and not isinstance(error, BrokenAnswer) and not error.status:
                    raise JudgeDown(f"the judge cannot be asked: {error.message}", where=error.where) from error
            await self._breaker.wait(attempts.pause_after(failure))

    def _read(self, answer: ChatAnswer) -> Judgement:
        if answer.refusal:
            raise NoJudgement(f"the judge refuses the request: {answer.refusal}")
        return judgement_of(self.rubric, answer, self._secret)

    async def _keep(self, key: str, judgement: Judgement, called: Called) -> Judgement:
        """Keep a judgement in the cache. A file that cannot be written costs the entry, not the judgement."""
        if self._cache is None:
            return judgement

        def keep(cache: JudgementCache) -> Judgement:
            tokens = {"input_tokens": called.answer.prompt_tokens, "output_tokens": called.answer.num_tokens}
            return cache.keep(key, judgement, **tokens, seconds=called.seconds)

        try:
            return await self._file.run(keep, self._cache)
        except RewardError as error:
            self._notify(f"a judgement is not kept: {error.message}")
            return judgement

    async def _try(self) -> Preflight:
        """Ask one small request, past the cache."""
        settings, picture = self.settings, tiny_png()
        if self._caller is None:
            raise JudgeRejected("the judge is offline: there is nothing to try")
        request = JudgeRequest(picture, picture)
        try:
            judgement, called = await self._answered(self._caller, self.key_of(request), request, is_trial=True)
        except JudgeDown as error:
            raise JudgeDown(error.message, where=error.where, hint=_advice(error.__cause__)) from None
        except NoJudgement as error:
            hint = error.hint or "choose a model that follows a JSON schema, or a server that enforces one"
            message = f"the judge answers, but {error.message.removeprefix('the judge ')}"
            raise JudgeRejected(message, hint=hint) from None
        answer = called.answer
        tokens = answer.prompt_tokens, answer.num_tokens
        cost = None if settings.prices is None or None in tokens else self._budget.cost(tokens[0] or 0, tokens[1] or 0)
        return Preflight(settings.provider, settings.name, settings.address, called.seconds, *tokens, cost, judgement)

    def _chat(self, key: str, request: JudgeRequest, *, again: bool = False) -> ChatRequest:
        settings = self.settings
        return make_chat(
            self.rubric,
            request,
            key,
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            again=again,
        )


def _advice(failure: BaseException | None) -> str:
    """Return what to do about the failure that ended the attempts; None = nothing was sent any more."""
    if isinstance(failure, EndpointError) and failure.is_busy:
        return "it has too much to do, or your quota is used up: try again later"
    if isinstance(failure, EndpointError) and failure.status:
        return "the server runs, but fails: see its log, or try again later"
    if isinstance(failure, BrokenAnswer):
        return "is the address right, and is it the server of a model?"
    return "is the server running, and is the address right?"
