"""Tool `search`: passages on this machine, or a search engine. A recipe names it in a file of one line, or in a task.

from vlmrl.search.tool import Search
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmrl.environments.base import CUT_MARK, ERROR, EnvironmentUnavailable, Observation, Started
from vlmrl.errors import DataError, RewardError, VlmrlError, unknown
from vlmrl.redaction.redact import excerpt
from vlmrl.search.cache import Results, SearchCache
from vlmrl.search.engines import ENGINES, MOST_QUERY, HttpEngine
from vlmrl.search.index import KINDS, Index, Passage, is_large, open_index
from vlmrl.services.protocol import BrokenAnswer, EndpointDown, RequestRefused
from vlmrl.untrusted import number_of

NOTHING = "nothing was found; try other words"
MOST_RESULTS = 50
TRIAL = "weather"
"""Query that tests an engine at the start of a run."""
REPLAY_HINT = (
    "`cache` in environment.args names the file, from the current folder; with replay = false the engine is asked"
)
RANGES: Mapping[str, tuple[float, float]] = {
    "results": (1, MOST_RESULTS),
    "chars": (1, math.inf),
    "seconds": (1e-3, 86_400),
    "per_second": (0, math.inf),
}
"""Argument -> least and largest number."""
TYPES = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}


def _check(name: str, value: Any, kind: type) -> None:
    """Raise a RewardError unless the value of an argument has the type, and is within the range."""
    least, most = RANGES.get(name, (-math.inf, math.inf))
    is_kind = type(value) is kind or (kind is float and type(value) is int)
    if not is_kind or (name in RANGES and not least <= value <= most):
        ends = f" from {least:g} to {most:g}" if most < math.inf else f" of {least:g} or more" if name in RANGES else ""
        raise RewardError(f"`{name}` in environment.args is {excerpt(repr(value), 60)}, not {TYPES[kind]}{ends}")


class Search:
    """Environment with the tool `search`.

    Args:
        engine: "fts5" or "tantivy" for a table of passages; "searxng", "serper", "tavily" or "bocha" over HTTP.
        corpus: the table; see `read_passages`. A relative path is one from the current folder.
        url: address of the engine; "" = its own. SearXNG has none.
        key_env: environment variable of the key; "" = the engine's usual one.
        results: number of results of a search.
        chars: characters of a result that the model sees.
        seconds: longest time of a search; `environment.tool_seconds` must be longer.
        cache: file of results; "" = data/search-ENGINE.sqlite. A relative path is one from the current folder.
        per_second: requests a second of all processes of this machine; 0 = no limit. A search whose turn does not come
            within half of `seconds` is not asked: an outage.
        replay: whether only the file is read. A query that is not in it ends the episode, which is left out.
    Raises: RewardError for arguments that cannot be used.
    """

    def __init__(
        self,
        engine: str = "fts5",
        corpus: str = "",
        url: str = "",
        key_env: str = "",
        results: int = 4,
        chars: int = 1000,
        seconds: float = 8.0,
        cache: str = "",
        per_second: float = 0.0,
        replay: bool = False,
    ) -> None:
        given = locals()
        for name, parameter in inspect.signature(Search).parameters.items():
            _check(name, given[name], type(parameter.default))
        if engine not in (*KINDS, *ENGINES):
            raise unknown("search engine", engine, [*KINDS, *ENGINES])
        if engine in KINDS and not corpus:
            hint = 'name a table with a column `text`: [environment] args = { corpus = "data/passages.jsonl" }'
            raise RewardError(f"the engine {engine} searches in a table of passages, and none is named", hint=hint)
        if engine in ENGINES and not (url or ENGINES[engine].url):
            hint = 'name your server: [environment] args = { url = "http://localhost:8888" }'
            raise RewardError(f"the engine {engine} has no address of its own", hint=hint)
        self._engine, self._corpus, self._url, self._key_env = engine, corpus, url, key_env
        self._results, self._chars, self._seconds, self._replay = results, chars, seconds, replay
        self._path, self._per_second = Path(cache or f"data/search-{engine}.sqlite"), per_second
        self._index: Index | None = None
        self._cache: SearchCache | None = None
        self._http: HttpEngine | None = None
        self._warnings = list[str]()

    @classmethod
    def __vlmrl_start__(cls, args: Mapping[str, Any], *, forks: bool) -> Started:
        """Make the index if it is missing, or try the engine. Return what is searched in.

        Args:
            forks: whether there will be episodes; if not, no engine is asked.
        Raises: RewardError for passages that cannot be read, a wrong key, or an engine that answers in another form.
        """
        try:
            one = cls(**args)
            if one._engine in KINDS:
                if is_large(one._corpus, one._engine):
                    hint = f"vlmrl prep passages {one._corpus} --kind {one._engine}"
                    raise RewardError("the index of so many passages takes long to make", where=one._corpus, hint=hint)
                index = one._open()
                note = f"search in {number_of(index.count, 'passage')} of {one._corpus} ({one._engine})"
                note += f"; {number_of(index.left_out, 'row')} without a text left out" if index.left_out else ""
                index.close()
                return Started(note, index.sha256)
            if one._replay and not one._path.is_file():
                raise RewardError(f"no file {one._path}, and replay is true", hint=REPLAY_HINT)
            cache = one._results_file()
            count = cache.count()
            note = f"search by {one._engine}, results in {one._path} ({count:,} so far)"
            if one._replay and not count:
                message = f"{one._path} has no results of {one._engine} {one._url}".rstrip()
                raise RewardError(f"{message}, and replay is true", hint=REPLAY_HINT)
            if not one._replay:
                http = one._client()
                if forks:
                    asyncio.run(http.search(TRIAL, one._results))
            cache.close()
            return Started(note, warning="; ".join(one._warnings))
        except RewardError:
            raise
        except VlmrlError as error:
            named = " (`corpus` in environment.args)" if isinstance(error, DataError) else ""
            message = f"the tool search cannot be used: {error.message}{named}"
            raise RewardError(message, where=error.where, hint=error.hint) from error

    async def search(self, query: str) -> Observation:
        """Search for passages of text. The result is a numbered list of the best.

        Args:
            query: a few words, such as names.
        """
        words = " ".join(query.split())
        if not words:
            return Observation(f"{ERROR}the query is empty")
        if self._engine in KINDS:
            results = Results(self._open().search(words, self._results))
        elif len(words) > MOST_QUERY:
            return Observation(f"{ERROR}the query has {len(words):,} characters, more than {MOST_QUERY}")
        else:
            results = await self._over_http(words)
        if results.refusal:
            return Observation(f"{ERROR}{results.refusal}")
        return Observation("\n".join(map(self._shown, range(1, self._results + 1), results.passages)) or NOTHING)

    async def _over_http(self, query: str) -> Results:
        cache = self._results_file()
        if (kept := cache.get(query, self._results)) is not None:
            return kept
        if self._replay:
            raise EnvironmentUnavailable(f"the query is not in {self._path}, and replay is true", hint=REPLAY_HINT)
        try:
            results = Results(await self._client().search(query, self._results))
        except RequestRefused as error:
            results = Results(refusal=f"{self._engine} refuses this query: {error.message}")
        except (EndpointDown, BrokenAnswer) as error:
            raise EnvironmentUnavailable(
                f"{self._engine}: {error.message}", where=error.where, hint=error.hint
            ) from None
        except VlmrlError as error:
            raise RewardError(f"{self._engine}: {error.message}", where=error.where, hint=error.hint) from None
        cache.keep(query, self._results, results)
        return results

    def _open(self) -> Index:
        self._index = self._index or open_index(self._corpus, self._engine)
        return self._index

    def _results_file(self) -> SearchCache:
        name = f"{self._engine} {self._url}".strip()
        self._cache = self._cache or SearchCache(self._path, name, self._per_second, notify=self._damaged)
        return self._cache

    def _damaged(self, text: str) -> None:
        if self._replay:
            raise RewardError(f"{self._path} is damaged, and replay is true", hint=REPLAY_HINT)
        self._warnings.append(text)

    def _client(self) -> HttpEngine:
        if self._http is None:
            turn = self._results_file().pause
            self._http = HttpEngine(self._engine, self._url, self._key_env, self._seconds, turn)
        return self._http

    def _shown(self, number: int, passage: Passage) -> str:
        text = " ".join(passage.text.split())
        text = text if len(text) <= self._chars else text[: self._chars] + CUT_MARK.strip()
        title = " ".join(passage.title.split())[:200]
        return f"{number}. {title}: {text}" if title else f"{number}. {text}"
