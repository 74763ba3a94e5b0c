"""Definition of a reward, the code that its worker runs, and the one function that turns its parts into one value.

A worker runs this module beside code that may replace functions of any module. So names are imported from modules here:
they are bound before that code runs. A user's source text, or the name of a function of vlmrl, is sent as JSON.

The part that is the accuracy is chosen in this order: the one that the recipe names (`[reward] accuracy`); the task's
own measure (`Task.outcome`); the one that the reward declares (`RewardSpec.accuracy`); a part called `accuracy`, `acc`
or `correct`, as rewards for EasyR1 and verl have it; the single number of a function in verl's form, unless `RANGES`
declares that it may exceed 1. It needs no weight. Of several rewards, the first one without a gate that has such a part
decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from math import fsum, inf, isfinite, nan
from typing import Any, NamedTuple, Protocol
from unicodedata import category

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import excerpt
from vlmrl.types import RewardInput, RewardResult, Score

Parts = Mapping[str, float | None]
RewardFn = Callable[..., "Parts | float | RewardResult"]


@dataclass(frozen=True)
class UserReward:
    """User's function as its worker needs it: with the source as it was read, so that a restart runs the same code.

    Args:
        file: path as shown to people.
        function: name in the file.
        style: calling convention, see rewards/user_reward.py; "auto" until the worker has inspected the function.
        args: keyword arguments bound to every call.
        batched: the function gets the whole list of responses in one call.
    """

    file: str
    function: str
    source: str
    style: str
    args: Mapping[str, Any]
    batched: bool = False

    @property
    def code(self) -> str:
        """Source as Python compiles it: without a byte order mark, which editors put before UTF-8."""
        return self.source.removeprefix("\ufeff")


@dataclass(frozen=True)
class WorkerFunction:
    """Built-in reward that runs in workers: the function that makes it there, and what that function takes.

    A reward runs in workers if it may hang or needs a main thread, or if it loads what no trainer should load. Its
    module is imported, and the function called, when a worker starts: that time is no response's.

    Args:
        name: of the reward, for messages.
        module: module of vlmrl; the trainer never imports it.
        function: name in the module: `function(**args)` returns RewardInput -> parts, or a RewardResult.
        args: JSON values.
    """

    name: str
    module: str
    function: str
    args: Mapping[str, Any] = field(default_factory=dict)
    batched = False

    @property
    def file(self) -> str:
        """Name of the code, for messages."""
        return f"built-in `{self.name}`"

    def make(self) -> RewardFn:
        """Import the module and return the reward. Raises: as the module and the function do."""
        return getattr(import_module(self.module), self.function)(**self.args)

    def reward(
        self, ranges: Mapping[str, tuple[float, float]], weights: Mapping[str, float], *, seconds: float, **facts: Any
    ) -> RewardSpec:
        """Return the reward: all its parts are 0 for a response that hangs its worker twice, unless `facts` say else.

        For tools and tests, it is a function of this process, too, made at its first call.
        """
        make_once = lru_cache(maxsize=1)(self.make)
        facts = {"on_timeout": dict.fromkeys(ranges, 0.0), "worker": self, "timeout_seconds": seconds, **facts}
        return RewardSpec(self.name, lambda x: make_once()(x), ranges, weights, **facts)


@dataclass(frozen=True)
class ServiceFunction:
    """Built-in reward that asks a service, and answers later: the function that opens it, and what that function takes.

    It runs in this process, because a worker must not have the key of a service. Many responses are asked at a time.

    Args:
        name: of the reward, for messages.
        module: module of vlmrl; it is imported when the first response is scored.
        function: name in the module: `function(**args)` returns a `Service`.
        args: JSON values.
    """

    name: str
    module: str
    function: str
    args: Mapping[str, Any] = field(default_factory=dict)
    batched = False

    def open(self, place: ServicePlace) -> Service:
        """Import the module and open the service. Raises: as the module and the function do."""
        return getattr(import_module(self.module), self.function)(**self.args, place=place)


@dataclass(frozen=True)
class ServicePlace:
    """Place of a service's files.

    Args:
        folder: folder of the run; None = of no run.
        account: name of what a budget counts together.
    """

    folder: str | None = None
    account: str = "run"


NO_PLACE = ServicePlace()


class Service(Protocol):
    """Reward that answers later."""

    def try_out(self) -> Mapping[str, Any]:
        """Send one request. Return the facts about it as JSON values; `line` has them in words.

        Raises: RewardError with what to do. RewardUnavailable for an outage.
        """
        ...

    def counts(self) -> Mapping[str, float]:
        """Return metric -> number since the service was opened."""
        ...

    def summary(self, counts: Mapping[str, float]) -> str:
        """Return counts in one line for people; "" if there is nothing to tell."""
        ...

    def submit(self, inputs: Sequence[RewardInput]) -> list[Future[RewardResult]]:
        """Begin to score responses. Return one future per response; it raises RewardUnavailable for an outage."""
        ...

    def close(self) -> None:
        """End it."""
        ...


WorkerReward = UserReward | WorkerFunction
"""Code of either kind."""


LARGEST = 1e9
"""Largest size of a part, of a weight and of their sum.

Rewards are of the order of 1, so a larger number is a mistake (1e308 would overflow a mean, and a float32 gradient long
before).
"""
EVERYTHING = (-inf, inf)
BREAKING = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories that a part's name may not hold.

They are controls (newlines too), half surrogate pairs, line and paragraph separators. No file can hold half a surrogate
pair, and no table the others.
"""
STYLES = ("vlmrl", "trl", "verl", "easyr1")
"""Calling conventions of users' rewards; see rewards/user_reward.py."""
GATE_PART = "gate"
"""Own name of the part that a reward with a gate gets: 1 where the gate is open, 0 where it is closed."""
VALUE_PART = {"trl": "reward", "verl": "score", "easyr1": "overall"}
"""Calling convention -> name of the part that is a plain number's; "reward" in vlmrl's own."""
EARNED = "failed again when scored alone; scored as `on_timeout`"
"""End of the note of a score that is `on_timeout`."""
NOT_FINITE = "is not a finite number"
ABSENT = "its weight goes to the other parts"
"""End of the note on a metric beside the score that is left out of the means."""
UNSCORED = Score(nan, {})
"""Score of a response that no reward has scored."""


@dataclass(frozen=True)
class RewardSpec:
    """Reward with its arguments bound.

    Args:
        name: built-in name or `file.py:function`.
        fn: RewardInput -> parts, or a RewardResult. Among the parts, a text under `note` is one line for people, and a
            mapping under `detail` says what the reward read and found.
        ranges: part -> (low, high), checked after every call; a part that is not listed may be any finite number.
        weights: default weight of each part; a part without a weight (here and in the recipe) is reported, not counted.
            Empty (here and in the recipe): the part `reward` counts, or, when there is none, every part with weight 1.
        pure: it may run in this process (built-ins only); a user's reward always runs in a worker, and so does a
            built-in with `worker`.
        needs_images, needs_token_ids: whether `RewardInput.images` and `RewardInput.token_ids` are filled.
        accuracy: the part that says whether a response is right; None = see `accuracy_part`.
        accuracy_named: the recipe names that part: it is then used instead of the task's own measure.
        on_timeout: parts of the score of a response that hangs or kills its worker twice, the second time alone; empty
            = it has no score, like any response on which the reward fails.
        source_sha256: hash of a user's source file; "" for a built-in.
        files: the modules that it imports from its own folder: relative path -> sha256.
        version: a built-in's declared version (see `Builtin`); None for a user's reward. Both are for the manifest.
        user: the user's function; None for a built-in. `fn` is then never called in this process.
        args: the arguments that were bound, as JSON values.
        free_args: further arguments that change no score, such as where a service is. They are recorded, and are no
            part of the reward's identity.
        worker: how workers make a built-in that runs there; None = it runs in this process, or is a user's.
        service: how a built-in is opened that asks a service and answers later; None = it is none.
        timeout_seconds: a built-in's own limit for one response, in seconds; it holds where the recipe's is longer.
        counts_work: it refuses a response by counted work, the same on every machine. Its own limit of time is then a
            backstop, which holds also where the recipe's is shorter.
        members: the rewards of which this one is the sum (see several.py); () = it is a single reward. `weights` then
            has the weight of each reward by its label, and `fn` is never called.
    """

    name: str
    fn: RewardFn
    ranges: Mapping[str, tuple[float, float]]
    weights: Mapping[str, float]
    pure: bool = False
    needs_images: bool = False
    needs_token_ids: bool = False
    accuracy: str | None = None
    accuracy_named: bool = False
    on_timeout: Mapping[str, float] = field(default_factory=dict)
    source_sha256: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    version: int | None = None
    user: UserReward | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    free_args: Mapping[str, Any] = field(default_factory=dict)
    worker: WorkerFunction | None = None
    service: ServiceFunction | None = None
    timeout_seconds: float = inf
    counts_work: bool = False
    members: tuple[Member, ...] = ()

    def __call__(self, x: RewardInput) -> Parts:
        return split_result(self.fn(x)).parts

    @property
    def key(self) -> str:
        """Name of the reward in `Score.detail`: a built-in's own; of `path/to/file.py:function` the function."""
        return self.name if self.user is None else self.user.function

    @property
    def is_builtin(self) -> bool:
        """Return whether it is a built-in: `ranges` then has every part that it may return."""
        return self.user is None and all(member.spec.is_builtin for member in self.members)

    @property
    def is_cheap(self) -> bool:
        """Whether all rewards are built-ins that call no service and look at no image: a check may ask them freely."""
        return all(one.is_builtin and not (one.service or one.needs_images) for one in self.singles)

    @property
    def singles(self) -> tuple[RewardSpec, ...]:
        """The single rewards that it consists of; (itself,) for a single one."""
        return tuple(member.spec for member in self.members) or (self,)

    @property
    def in_worker(self) -> WorkerReward | None:
        """Code that workers run; None = the reward runs in this process."""
        return self.user or self.worker


@dataclass(frozen=True)
class Member:
    """One of several rewards.

    Args:
        label: name of the reward among the others, and the beginning of the names of its parts.
        weights: weights of its own parts within its own score, under their own names.
        weight: weight of its score in the sum.
        gate: the part of another reward, as it is named in the sum, that must be above 0; None = it always counts.
        timeout_seconds: limit of one call in a worker; None = that of all rewards.
        of_task: whether it is a reward of the task of the rows: the task's measures then read its score.
    """

    label: str
    spec: RewardSpec
    weights: Mapping[str, float] = field(default_factory=dict)
    weight: float = 1.0
    gate: str | None = None
    timeout_seconds: float | None = None
    of_task: bool = False

    @property
    def unnamed(self) -> str:
        """Own name of the part that is called like the label: that of a plain number, or a built-in's only part."""
        if self.spec.is_builtin and len(self.spec.ranges) == 1:
            return next(iter(self.spec.ranges))
        return VALUE_PART.get(self.spec.user.style if self.spec.user else "", "reward")

    @property
    def may_not_count(self) -> bool:
        """Return whether it may not count in a response: it has a gate, or TRL's form, which may return None."""
        return self.gate is not None or (self.spec.user is not None and self.spec.user.style == "trl")

    @property
    def declared(self) -> list[str]:
        """Parts that are known before the reward has run, as they are named in the sum."""
        return [self.name_of(part) for part in dict.fromkeys([*self.spec.ranges, *self.weights])]

    @property
    def gate_part(self) -> str:
        """Name of the part that says whether its gate is open; "" if it has no gate."""
        return f"{self.label}.{GATE_PART}" if self.gate is not None else ""

    def name_of(self, part: str) -> str:
        """Return the name of one of its parts in the sum: `label.part`, or `label` for the unnamed part."""
        return self.label if part == self.unnamed else f"{self.label}.{part}"

    def has(self, name: str) -> bool:
        """Return whether a part of the sum belongs to this reward."""
        return label_of(name) == self.label

    def own(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the sum's parts that this reward returned, under their own names."""
        names = [name for name in parts if self.has(name) and name != self.gate_part]
        return {self.unnamed if name == self.label else name.partition(".")[2]: parts[name] for name in names}


def label_of(part: str) -> str:
    """Return the label of the reward that a part of the sum belongs to."""
    return part.partition(".")[0]


def _refuse(x: RewardInput) -> Parts:
    raise RewardError("there is no reward", hint='name one: [reward] name = "path/to/file.py:function"')


NO_REWARD = RewardSpec("", _refuse, {}, {}, pure=True)
"""Reward of a source whose responses are not scored: supervised training without validation."""


def earned_on_timeout(score: Score) -> bool:
    """Return whether a score is `on_timeout`: the response hung or killed the worker twice."""
    return score.note.endswith(EARNED)


def counting_weights(parts: Parts, weights: Mapping[str, float]) -> Mapping[str, float]:
    """Return the weights for these parts: those given, else 1 for the part `reward`, else 1 for every part."""
    return weights or ({"reward": 1.0} if "reward" in parts else dict.fromkeys(parts, 1.0))


def value_range(
    all_parts: Iterable[Parts], weights: Mapping[str, float], ranges: Mapping[str, tuple[float, float]]
) -> tuple[float, float] | None:
    """Return the least and the largest value of responses with such parts; None if a part has no declared range.

    Args:
        all_parts: parts of responses. Only which of them apply matters: the weight of one that is None goes to others.
        weights: as `combine` takes them.
        ranges: part -> (low, high), see `RewardSpec.ranges`.
    Example: weights {a: 0.5, b: 0.5}, ranges {a: (0, 1), b: (-1, 1)} -> (-0.5, 1); if only b applies (-1, 1).
    """
    ends: list[tuple[float, float]] = []
    for applying in {frozenset((name, value is not None) for name, value in parts.items()) for parts in all_parts}:
        shown = {name: 0.0 if applies else None for name, applies in applying}
        applied_weights = counting_weights(shown, weights)
        _, shares = combine({**dict.fromkeys(applied_weights), **shown}, applied_weights)
        sides = [[share * end for end in ranges.get(name, EVERYTHING)] for name, share in shares.items() if share]
        ends.append((fsum(map(min, sides)), fsum(map(max, sides))))
    if not ends or not all(isfinite(low) and isfinite(high) for low, high in ends):
        return None
    return min(low for low, _ in ends), max(high for _, high in ends)


def combine(parts: Parts, weights: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """Return the weighted sum of the parts that apply, and the effective weight of each.

    The weight of a part that is None is spread over the others in proportion to their weights, so the largest possible
    value does not depend on which parts apply. Parts without a weight are reported but not counted.

    Args:
        parts: part -> number or None (not applicable).
        weights: part -> weight, used as given: value = sum of weight * part when every part applies.
    Returns: (value, part -> effective weight; the effective weights add up to the sum of all weights).
    Raises: RewardError when every weighted part is None, the weighted parts that remain have total weight 0, or the
        value is beyond LARGEST.
    Example: parts {a: 1, b: None}, weights {a: 0.5, b: 0.5} -> 1.0, {a: 1.0}.
    """
    shares: dict[str, float] = {}
    terms: list[float] = []
    for name, weight in weights.items():
        part = parts.get(name)
        if part is not None:
            shares[name] = weight
            terms.append(weight * part)
    if len(shares) < len(weights) or not shares:
        shares = _spread(shares, parts, weights)
        terms = [share * float(parts[name] or 0.0) for name, share in shares.items()]
    try:
        value = fsum(terms)
    except (OverflowError, ValueError):  # the parts include infinities of both signs
        value = nan
    if not -LARGEST <= value <= LARGEST:
        terms_text = " + ".join(f"{share:g} x {parts[name]:g}" for name, share in shares.items())
        raise RewardError(f"the score {terms_text} is beyond {LARGEST:g}", hint="lower the parts, or [reward.weights]")
    return value, shares


def value_bounds(spec: RewardSpec, weights: Mapping[str, float]) -> tuple[float, float]:
    """Return the least and the largest score that a reward can give with these weights: the sum of weight times range.

    An end is infinite if a weighted part declares no range, or if there are no weights. One reward of several that does
    not count in a response adds 0.
    """
    if spec.members:
        sides = [
            [*([0.0] if m.may_not_count else []), *(weights[m.label] * end for end in value_bounds(m.spec, m.weights))]
            for m in spec.members
            if weights.get(m.label)
        ]
        return fsum(map(min, sides)), fsum(map(max, sides))
    if not weights:
        return EVERYTHING
    low = high = 0.0
    for part, weight in weights.items():
        if weight:
            ends = [weight * end for end in spec.ranges.get(part, EVERYTHING)]
            low, high = low + min(ends), high + max(ends)
    return low, high


def check_weight_sizes(weights: Mapping[str, float], whose: str) -> None:
    """Raise a RewardError for a weight that is not finite, or beyond LARGEST."""
    for part, weight in weights.items():
        if not -LARGEST <= weight <= LARGEST:
            raise RewardError(
                f"the weight of the part `{part}` is {weight:g}, not a number from -{LARGEST:g} to {LARGEST:g}",
                where=whose,
                hint="weights are of the order of 1",
            )


def absent_parts(parts: Parts, weights: Mapping[str, float]) -> str:
    """Return a note that names the weighted parts that were not returned; "" if all were.

    Raises: RewardError when the weights name none of the parts that were returned.
    """
    absent = [name for name in weights if name not in parts]
    if parts and absent and not parts.keys() & weights.keys():
        weighted, returned = ", ".join(weights), ", ".join(parts)
        if not any(value is not None for value in parts.values()):
            raise RewardError(
                f"it returned None, and its weights name {weighted}",
                hint="without a `return` a function gives None; return a number for each part, "
                "and None only for one that does not apply",
            )
        raise RewardError(
            f"its weights name {weighted}, but the parts that it returned are: {returned}",
            hint="correct [reward.weights], or return a part of that name",
        )
    return f"the reward returned no {', '.join(f'`{name}`' for name in absent)}: {ABSENT}" if absent else ""


def _spread(shares: Mapping[str, float], parts: Parts, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of the parts that apply, scaled so that their sum equals that of the weights of all parts."""
    total = fsum(weight for name, weight in weights.items() if name in parts)
    remaining = fsum(shares.values())
    if not shares or (remaining == 0 and total != 0):
        raise RewardError(
            f"no part of the reward applies: {', '.join(sorted(parts)) or 'it returned no part'}",
            hint="return a number for at least one weighted part (without a `return` a function gives None), or leave "
            "the row out of the dataset",
        )
    missing = any(parts[name] is None for name in weights if name in parts)
    scale = total / remaining if missing and remaining else 1.0
    return {name: share * scale for name, share in shares.items()}


class Returned(NamedTuple):
    """Result of a reward, taken apart. None of it is checked yet."""

    parts: dict[str, Any]
    note: str
    detail: Any = None
    artifacts: Mapping[str, Any] = {}


def split_result(result: Any) -> Returned:
    """Take apart the result of a reward.

    A bare number is the part `reward`. In a mapping, a text under `note` is the note, a mapping under `detail` the
    detail.

    Raises: RewardError for a RewardResult whose note is no text.
    """
    if type(result) is not dict:
        if isinstance(result, RewardResult):
            return _split_whole(result)
        if not isinstance(result, Mapping):
            return Returned({"reward": result}, "")
    parts = dict(result)
    note, detail = parts.get("note"), parts.get("detail")
    if type(detail) is dict or isinstance(detail, Mapping):
        del parts["detail"]
    else:
        detail = None
    if not isinstance(note, str):
        return Returned(parts, "", detail)
    del parts["note"]
    return Returned(parts, note, detail)


def _split_whole(result: RewardResult) -> Returned:
    parts, note, detail, _ = split_result(result.parts)
    own_note, own_detail, artifacts = result.note, result.detail, result.artifacts
    if not isinstance(own_note, str):
        raise RewardError(f"the note of the reward is a {type(own_note).__name__}, not a text")
    return Returned(parts, own_note or note, detail if own_detail is None else own_detail, artifacts)


def part_name(key: Any, what: str = "part") -> str:
    """Return the name of a part, or of an artifact.

    Raises: RewardError for a name that is no text, or that cannot be shown in one line.
    """
    if not isinstance(key, str):
        raise RewardError(
            f"{'an' if what[0] in 'aeiou' else 'a'} {what} of the reward has the name {excerpt(repr(key), 80)}, "
            f"a {type(key).__name__}",
            hint=f"names of {what}s are texts: write it in quotes",
        )
    name = key if type(key) is str else str(key)
    if _breaks(name):
        raise RewardError(
            f"the name of {'an' if what[0] in 'aeiou' else 'a'} {what} has a character that cannot be shown in a "
            f"line: {excerpt(ascii(name), 80)}",
            hint=f"name {what}s with plain words, such as `format`",
        )
    return name


@lru_cache(maxsize=1024)
def _breaks(name: str) -> bool:
    return not (name.isascii() and name.isprintable()) and any(category(c) in BREAKING for c in name)


def check_parts(parts: Mapping[Any, Any], ranges: Mapping[str, tuple[float, float]]) -> dict[str, float | None]:
    """Return the parts (without a note, see `split_result`) as a dict of floats.

    A number is any value that declares to be a real number: bool, int, float, Decimal, Fraction, a scalar of NumPy, a
    tensor of one element. Texts ("0.5"), lists, complex numbers (also with an imaginary part of 0) and dates are not
    numbers.

    Raises: RewardError that names the part which is not a number, not finite, beyond LARGEST or outside its declared
        range; for a name that is invalid (`part_name`) or that two parts have.
    """
    checked: dict[str, float | None] = {}
    for key, value in parts.items():
        name = key if type(key) is str and key in ranges else part_name(key)  # declared names were checked before
        if name in checked:
            raise RewardError(f"two parts of the reward are called `{name}`", hint="give each part another name")
        number = value if value is None or type(value) is float else _number(value)
        low, high = ranges.get(name, EVERYTHING)
        if number is not None and not (low <= number <= high and -LARGEST <= number <= LARGEST):
            if not isfinite(number):
                raise RewardError(
                    f"reward part `{name}` is {excerpt(repr(value), 80)}, not a finite number",
                    hint="return a float, a mapping of floats, or None for a part that does not apply",
                )
            if not low <= number <= high:
                raise RewardError(f"reward part `{name}` is {number}, outside its declared range [{low}, {high}]")
            raise RewardError(
                f"reward part `{name}` is {number:g}, beyond {LARGEST:g}", hint="rewards are of the order of 1"
            )
        checked[name] = number
    return checked


def check_on_timeout(
    parts: Any, ranges: Mapping[str, tuple[float, float]], where: str | None = None
) -> dict[str, float]:
    """Return the checked parts of the score of a response that hangs or kills its worker.

    Raises: RewardError for anything but a mapping of parts to numbers, or for numbers outside of the parts' ranges.
    """
    if not isinstance(parts, Mapping):
        raise RewardError(f"on_timeout is {excerpt(repr(parts), 80)}, not parts with their numbers", where=where)
    try:
        checked = check_parts(parts, ranges)
    except RewardError as error:
        raise RewardError(f"on_timeout cannot be used: {error.message}", where=where, hint=error.hint) from error
    return {name: number for name, number in checked.items() if number is not None}


def _number(value: Any) -> float:
    """Return a part as a float; NaN for a value that is no real number, or too large for a float."""
    kind = getattr(
        getattr(value, "dtype", None), "kind", "f"
    )  # for NumPy: float() would also accept complex numbers and dates
    if isinstance(value, (str, bytes, bytearray, memoryview)) or kind not in "biuf":
        return nan
    try:
        return float(value.item() if getattr(value, "shape", ()) or hasattr(value, "is_complex") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return nan


NAMES = ("accuracy", "acc", "correct")
"""Names of a part that is an accuracy; the first that is present is used."""
FUNCTION = re.compile(rf"(?:.*_)?(?:{'|'.join(NAMES)})(?:_(?:reward|score|func|fn))*")
"""Names of functions whose single number is an accuracy: `accuracy_reward`."""
RIGHT = 1.0
"""Accuracy of a right answer. 0 or -1 is a wrong answer; a number between is a partly right answer."""


def accuracy_part(parts: Collection[str], spec: RewardSpec) -> str | None:
    """Return the part that is the accuracy, among the parts that a reward returned; None if there is none."""
    if spec.accuracy is not None:
        return spec.accuracy if spec.accuracy in parts else None
    if spec.members:
        return next(iter(accuracy_parts(parts, spec)), None)
    if spec.user is not None and spec.user.style == "verl" and set(parts) == {"score"}:
        return "score" if spec.ranges.get("score", (0.0, RIGHT))[1] <= RIGHT else None
    return next((name for name in NAMES if name in parts), None)


def accuracy_parts(parts: Collection[str], spec: RewardSpec) -> list[str]:
    """Return the parts of several rewards that could be the accuracy; the first one is used.

    A reward with a gate is left out: its part is missing wherever the gate is closed, so a mean over it is no accuracy.
    """
    choices = []
    for member in spec.members:
        own = accuracy_part(member.own(dict.fromkeys(parts)), member.spec) if member.gate is None else None
        choices += [] if own is None else [member.name_of(own)]
    return choices


def other_choices(parts: Collection[str], spec: RewardSpec) -> str:
    """Return in words which of several accuracies of the rewards is used; "" if there is only one, or one is named."""
    choices = [] if spec.accuracy_named else accuracy_parts(parts, spec)
    if len(choices) < 2:
        return ""
    others = ", ".join(f"`{name}`" for name in choices[1:])
    return f'the accuracy is `{choices[0]}`, not {others}: [reward] accuracy = "PART" names another'


def with_accuracy(
    outcome: Mapping[str, float | None], parts: Mapping[str, float | None], spec: RewardSpec
) -> dict[str, float | None]:
    """Return the task's outcome of a response, with the reward's accuracy if that one is used (see the module)."""
    if "accuracy" in outcome and not spec.accuracy_named:
        return dict(outcome)
    name = accuracy_part(parts, spec)
    return dict(outcome) if name is None else {**outcome, "accuracy": parts[name]}


def is_binary(values: Collection[float]) -> bool:
    """Return whether accuracies are only right or wrong: all are 1, 0 or -1."""
    return {*values} <= {RIGHT, 0.0, -RIGHT}


def accuracy_words(
    measured: Collection[str], parts: Collection[str], values: Collection[float], spec: RewardSpec
) -> str:
    """Return the source of the accuracy in words; "" if the task itself measures it, or there is none.

    Args:
        measured: names of the numbers that the task measures.
        parts: names of the parts that the reward returned.
        values: accuracies of the responses.
    """
    name = None if "accuracy" in measured and not spec.accuracy_named else accuracy_part(parts, spec)
    if name is None:
        return ""
    addition = "" if is_binary(values) else ", which is not only right or wrong: the mean is shown"
    return f"the part `{name}` of {spec.name}{addition}"
