"""Marks of recipe keys: rule for a change on resume, kind of run that reads the key, and whether it names a file.

Marks are written in the annotation of a key: `lr: Annotated[Positive, UPDATE] = 1e-6`. Every key has exactly one
`OnResume` mark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vlmrl.key_facts import OnResume

LENGTH = OnResume("free", "the length of the run")
CADENCE = OnResume("free", "validation, output and saving")
DISPLAY = OnResume("free", "the loggers that show the numbers")
SPEED = OnResume("free", "the place and speed of the same computation")
LIMIT = OnResume("free", "a bound that stops a run, or a permission")
MOVED = OnResume("free", "the path of a file; its content is compared by its hash")
ROWS = OnResume("asked", "the rows")
SOURCES = OnResume("asked", "the sources")
ORDER = OnResume("asked", "the order of the rows, and every sample")
PROMPT = OnResume("asked", "the prompt and its images", ("best",))
REWARD = OnResume("asked", "the reward", ("best",))
MEASURE = OnResume("asked", "the validation and its metrics", ("best",))
SAMPLING = OnResume("asked", "the sampling")
ENDING = OnResume("asked", "the end of sampled and validated responses", ("best",))
UPDATE = OnResume("asked", "the update")
RUN_KIND = OnResume("refused", "sft and rl are different runs: start a new one from the weights, --set model.path=RUN")
WEIGHTS = OnResume("refused", "the weights are the checkpoint's: start a new run from the other model")
WEIGHT_TYPE = OnResume(
    "refused",
    "the saved weights and moments are of this type: start a new run from the weights, --set model.path=RUN",
)
TRAINED_PARTS = OnResume(
    "refused",
    "the checkpoint holds the moments of the parts that were trained, and no others: start a new run from the weights, "
    "--set model.path=RUN",
)
ADAPTER = OnResume(
    "refused",
    "the checkpoint holds this adapter and no other: merge it with `vlmrl merge RUN --out FOLDER`, then start a new "
    "run, --set model.path=FOLDER",
)


@dataclass(frozen=True)
class ReadBy:
    """Mark of a key that only one kind of run reads. A recipe of the other kind gets a warning if it sets the key."""

    kind: Literal["rl", "sft"]


RL_ONLY, SFT_ONLY = ReadBy("rl"), ReadBy("sft")


@dataclass(frozen=True)
class NamesFile:
    """Mark of a key whose value, or whose list of values, may name a file or folder.

    Args:
        or_name: whether the value may also be a plain name (of a task, a split, a reward, a logger). Then a plain name
            is never read as the path of a folder that has the same name.
    """

    or_name: bool = False


FILE, FILE_OR_NAME = NamesFile(), NamesFile(or_name=True)
