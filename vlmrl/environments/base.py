"""Values that an environment gets and returns, and its settings. A user's environment imports this module.

The smallest environment is one typed function: `environment = "tools.py:zoom"`. A list of functions works too, and so
does a class in the form of TRL's `environment_factory`: its public methods are the tools, beside `reset(**row)` and
`get_reward()`. A dict of such classes is chosen from by the row's column `environment`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmrl.errors import RewardUnavailable
from vlmrl.types import Size

ERROR = "error: "
"""Beginning of an observation in words about a bad call, or a tool's error."""
CUT_MARK = "\n[... cut ...]\n"
"""Text in the middle of an observation that was cut."""
MOST_TEXT_CHARS = 1 << 20
"""Largest number of characters of one text of an observation; `[environment]` allows fewer."""
TOKEN_CHARS = 32
"""Characters of a text that are kept for each token that the policy may see of it: far more than a token has."""
IMAGE_MARK = "<image>"
"""Place of an image in the text of an `Observation`."""


def ends_of(whole: Any, most: int) -> tuple[Any, Any]:
    """Return what is kept of the beginning and of the end of a text, or of its tokens, that is cut to `most`."""
    return whole[: most // 2], whole[len(whole) - most // 2 :]


class EnvironmentUnavailable(RewardUnavailable):
    """Error: a service that an environment needs is down. `reset`, a tool or `get_reward` raises it, with the reason.

    This is no error of a tool, which the model would see, and no bug. The episode ends, and its sample is left out.
    """


@dataclass(frozen=True, slots=True)
class Observation:
    """Next thing that the policy sees; a tool may return one instead of a text or an image.

    Args:
        text: with one `<image>` for each image, in order; without any, the images come first.
        images: PIL images.
        done: whether the episode ends now; the policy then does not see this.
        measured: numbers for the reward and the metrics. They are no score by themselves.
    """

    text: str = ""
    images: Sequence[Any] = ()
    done: bool = False
    measured: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Start:
    """Begin of an episode, for a tool that is a function: its first parameter annotated `Start` gets this.

    Args:
        columns: columns of the row, without its truth.
        images: the images of the prompt, PIL RGB as stored.
        seen_sizes: (width, height) of each image as the model saw it: those of the prompt, then those that tools have
            shown in earlier turns; () = unknown.
        seed: seed of the episode.
        prompt: the prompt as text.
    """

    columns: Mapping[str, Any] = field(default_factory=dict)
    images: Sequence[Any] = ()
    seen_sizes: tuple[Size, ...] = ()
    seed: int = 0
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """Facts that an environment says when it is loaded; see `STARTS` in environments/worker.py.

    Args:
        note: about itself, for `check`.
        identity: hash of what it reads beside its code, such as passages; it is a part of the run's identity.
        warning: what the user should know before a run; "" = nothing.
    """

    note: str
    identity: str = ""
    warning: str = ""


@dataclass(frozen=True, slots=True)
class UserEnvironment:
    """User's environment, as its processes load it.

    Args:
        file: path of the file, for messages.
        name: of the function, list, class or dict in it.
        code: text of the file, as it was hashed.
        args: arguments of the class or the functions, as JSON values.
    """

    file: str
    name: str
    code: str
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.code.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class EnvironmentLimits:
    """Limits of an environment's processes.

    Args:
        tool_seconds: longest time of one call, in seconds of wall clock.
        memory_mb: memory of an episode's process in MiB.
        workers: number of calls that run at the same time.
        image_pixels: largest area of an image that the policy sees; a larger one is shrunk.
        text_chars: longest text; a longer one is cut in the middle, so that none takes the time of the trainer.
        calls: largest number of calls in a turn.
        grey_images: whether grey images of the same size are sent in the place of the environment's own.
    """

    tool_seconds: float = 10.0
    memory_mb: int = 2048
    workers: int = 4
    image_pixels: int = 1 << 20
    text_chars: int = MOST_TEXT_CHARS
    calls: int = 8
    grey_images: bool = False

    @classmethod
    def of(cls, settings: Any, workers: int) -> EnvironmentLimits:
        """Return the limits of a recipe's table `[environment]`, with the number of workers of this process."""
        s = settings
        chars = min(MOST_TEXT_CHARS, TOKEN_CHARS * s.observation_tokens)
        return cls(s.tool_seconds, s.memory_mb, workers, s.image_pixels, chars, grey_images=s.grey_images)
