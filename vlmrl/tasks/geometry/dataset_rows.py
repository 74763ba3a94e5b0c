"""Rows of the dataset that is written: of published problems and of drawn ones, in one form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl.data.doctor import RowFacts
from vlmrl.data.image_shards import Examined, examine
from vlmrl.tasks.dataset_assembly import PlannedRow, PromptLengths
from vlmrl.tasks.geometry.drawn.collection import DrawnProblem
from vlmrl.tasks.geometry.task import Collection, geometry_task
from vlmrl.tasks.geometry.written import WrittenProblem
from vlmrl.tasks.prompt_template import IMAGE
from vlmrl.types import Media, hash64


def row_schema() -> Any:
    """Return the Arrow schema of the rows."""
    import pyarrow as pa

    truth = [(name, pa.string()) for name in ("answer", "solution", "topic", "kind")]
    image = pa.struct([("sha256", pa.string()), ("width", pa.int64()), ("height", pa.int64()), ("kind", pa.string())])
    return pa.schema(
        [
            ("prompt_id", pa.string()),
            ("truth", pa.struct(truth)),
            ("images", pa.list_(image)),
            ("problem", pa.string()),
            ("origins", pa.list_(pa.string())),
        ]
    )


def row_fields(
    name: str, parts: Sequence[Path], rows: Sequence[PlannedRow], media: Sequence[Media]
) -> Iterator[dict[str, Any]]:
    """Yield the columns of published problems, their texts read again from the parts. See `Assembly.fields`."""
    facts_by_key = {row.key: row.facts for row in rows}
    for index in sorted({index for index, _ in facts_by_key}):
        for number, text in enumerate(parts[index].read_text(encoding="ascii").splitlines()):
            if (facts := facts_by_key.get((index, number))) is not None:
                line = json.loads(text)
                truth = {"answer": line["text"], "solution": line["solution"], "topic": None, "kind": None}
                yield _fields(name, line["problem"], truth, [media[i] for i in facts.images], facts.name)


def drawn_rows(
    collection: Collection, problems: Mapping[str, Sequence[DrawnProblem]]
) -> tuple[dict[str, list[PlannedRow]], list[Examined], dict[str, bytes]]:
    """Return the rows of drawn problems, and each image with its file by content hash, in the same order.

    Args:
        problems: split -> problems, each with an image of its own.
    """
    lengths = PromptLengths(geometry_task(collection, {}))
    files: dict[str, bytes] = {}
    images: list[Examined] = []
    planned: dict[str, list[PlannedRow]] = {}
    for split, members in problems.items():
        planned[split] = []
        for number, drawn in enumerate(members):
            images.append(examine(drawn.image))
            files[images[-1].media.sha256] = drawn.image
            tokens = lengths.of({"problem": f"{IMAGE}{drawn.text}"}, [images[-1].media])
            facts = RowFacts((len(images) - 1,), None, None, tokens, (), f"drawn {split} {number}")
            planned[split].append(PlannedRow(drawn, facts))
    return planned, images, files


def drawn_fields(name: str, rows: Sequence[PlannedRow], media: Sequence[Media]) -> Iterator[dict[str, Any]]:
    """Yield the columns of drawn problems. See `Assembly.fields`."""
    for row in rows:
        drawn: DrawnProblem = row.key
        problem = drawn.problem
        truth = {
            "answer": problem.answer,
            "solution": f"{problem.steps} The answer is $\\boxed{{{problem.answer}}}$.".lstrip(),
            "topic": drawn.topic,
            "kind": problem.kind,
        }
        yield _fields(name, f"{IMAGE}{drawn.text}", truth, [media[i] for i in row.facts.images], row.facts.name)


def written_rows(
    collection: Collection, problems: Mapping[str, Sequence[WrittenProblem]]
) -> dict[str, list[PlannedRow]]:
    """Return the rows of problems in text alone: split -> rows."""
    lengths = PromptLengths(geometry_task(collection, {}))
    return {
        split: [
            PlannedRow(one, RowFacts((), None, None, lengths.of({"problem": one.text}, []), (), f"{split} {number}"))
            for number, one in enumerate(members)
        ]
        for split, members in problems.items()
    }


def written_fields(name: str, rows: Sequence[PlannedRow], media: Sequence[Media]) -> Iterator[dict[str, Any]]:
    """Yield the columns of problems in text alone. See `Assembly.fields`."""
    for row in rows:
        problem: WrittenProblem = row.key
        solution = f"{problem.steps} The answer is $\\boxed{{{problem.answer}}}$."
        truth = {"answer": problem.answer, "solution": solution, "topic": problem.topic, "kind": problem.kind}
        yield _fields(name, problem.text, truth, [], f"written {row.facts.name}")


def _fields(
    name: str, problem: str, truth: Mapping[str, str | None], images: Sequence[Media], origin: str
) -> dict[str, Any]:
    content = hash64(name, problem, truth["answer"], *(image.sha256 for image in images))
    return {
        "prompt_id": f"{name}-{content:016x}",
        "truth": dict(truth),
        "images": images,
        "problem": problem,
        "origins": [origin],
    }
