"""Tool `python`: code of the model, run in a sandbox. A recipe names it in a file of one line, or in a task.

from vlmrl.environments.python_tool import Python
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vlmrl.environments.base import ERROR, Observation, Started
from vlmrl.errors import EngineError, RewardError
from vlmrl.sandbox.box import GONE, Ran, Sandbox, Session
from vlmrl.sandbox.confine import BoxLimits, layers

SILENT = "the code printed and showed nothing"
LOST = "The variables and files are lost."


class Python:
    """Environment with the tool `python`. Each episode has a session of its own.

    Args:
        seconds: wall time of a call; `environment.tool_seconds` must be longer.
        memory_mb: memory of the code, in MiB.
        output: number of bytes of what the code prints that the model sees.
        images: number of pictures that a call may show.
    """

    sandbox: ClassVar[Sandbox | None] = None

    def __init__(self, seconds: float = 8.0, memory_mb: int = 1024, output: int = 4000, images: int = 4) -> None:
        self._limits = BoxLimits(seconds, memory_mb, output, images=images)
        self._session: Session | None = None
        self._all: list[Any] = []
        self._new: list[Any] = []
        self._seed = 0

    @classmethod
    def __vlmrl_start__(cls, args: Mapping[str, Any], *, forks: bool) -> Started:
        """Start the sandbox of all episodes, which are forks of this process. Return what confines the code, in words.

        Args:
            forks: whether there will be forks; if not, nothing is started.
        Raises: RewardError where code cannot be confined.
        """
        try:
            here = layers()
            here.require()
            if forks:
                Python.sandbox = Sandbox()
        except EngineError as error:
            raise RewardError(error.message, hint=error.hint) from error
        return Started(f"python runs in a sandbox: {here.words}")

    def reset(self, images: Sequence[Any], seed: int) -> None:
        """Begin an episode with the pictures of the prompt."""
        self._all, self._new, self._seed = list(images), list(images), seed

    def python(self, code: str) -> Observation:
        """Run Python code, and see what it prints and the pictures that it shows.

        `images` is a list with all pictures so far, as PIL images; they are also the files image_0.png, image_1.png,
        and so on. `show(picture)` shows a picture: an image of PIL, an array or a figure of matplotlib. Open figures,
        and picture files that the code writes, are shown by themselves. Variables and files stay until the answer.
        numpy, PIL and cv2 are there. Not there: network, files elsewhere, other processes, asyncio, input(), windows.

        Args:
            code: the code; the value of an expression in its last line is printed.
        """
        new, self._new = self._new, []
        if self._session is None:
            if self.sandbox is None:  # called in Python, without the processes of a run
                self.__vlmrl_start__({}, forks=True)
            assert self.sandbox is not None
            self._session = self._open(self.sandbox)
        ran, done = None, False
        try:
            ran = self._session.run(code, new, keep=True)
            done = not ran.ended
        finally:  # also where the call is interrupted
            if not done:
                self._session.close()
                self._session, self._new = None, list(self._all)
        if ran.error == GONE:  # the policy is not to learn from it
            raise RewardError(GONE)
        if not ran.error:
            self._all += [image for _, image in ran.images]
        return self._told(ran)

    def _open(self, sandbox: Sandbox) -> Session:
        try:
            return sandbox.open(self._seed, self._limits)
        except EngineError as error:
            raise RewardError(error.message) from error

    def _told(self, ran: Ran) -> Observation:
        """Return what the model sees of a run."""
        printed, shown = ran.printed.strip("\n"), [image for _, image in ran.images]
        if ran.error:
            lost = f"\n{LOST}" if ran.ended else ""
            return Observation(f"{ERROR}{ran.error}{lost}" + (f"\nprinted before: {printed}" if printed else ""))
        return Observation(printed or ("" if shown else SILENT), shown)
