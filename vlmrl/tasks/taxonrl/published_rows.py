"""`vlmrl prep <domain>` from a table in TaxonRL's form (`problem`, `images`, `answer`, `answer_im`).

Every row is checked and gets a typed truth, the splits are kept, and validation rows are separated.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vlmrl.data.dataset_writer import building, refuse_other
from vlmrl.data.doctor import RowFacts
from vlmrl.data.image_scan import EXAMINER, Examined, Examiner, RowPlace, RowReader, examined, look_at_cell
from vlmrl.data.open_dataset import Cut, RowUnits, cut_rows
from vlmrl.data.parallel_parts import make_parts, write_lines
from vlmrl.data.table_pieces import RowFiles, TablePiece, locate_rows, open_row_files, read_piece
from vlmrl.data.table_values import PAIRS, match_columns, show, split_images
from vlmrl.errors import DataError, RewardError
from vlmrl.tasks.dataset_assembly import (
    Assembly,
    Limits,
    PlannedRow,
    Prepared,
    PromptLengths,
    assemble,
    is_few,
    leave_out,
    short_source,
)
from vlmrl.tasks.pairs.prep import count_pairs, pair_id
from vlmrl.tasks.prompt import IMAGE
from vlmrl.tasks.taxonrl.domains import DOMAINS, LAYOUTS, Domain, classes_of, known_fields, truth_distance
from vlmrl.tasks.taxonrl.task import domain_task
from vlmrl.types import Media

IMAGES_IN_A_ROW = 2


@dataclass(frozen=True)
class RowColumns:
    """Columns of a table; None = the table has none.

    Args:
        composite: TaxonRL's `answer_im`: a `;`-separated text with the answer and the names.
    """

    images: str
    problem: str | None
    answer: str | None
    composite: str | None

    @property
    def names(self) -> list[str]:
        return [name for name in (self.images, self.problem, self.answer, self.composite) if name]


def find_columns(table: RowFiles, classes: Sequence[str]) -> RowColumns:
    """Return the columns of a table, TaxonRL's names first.

    Args:
        classes: columns that a table of labelled images would have, for the error message.
    Raises: DataError when images or answers are missing.
    """
    columns = table.columns
    roles = match_columns(PAIRS, columns)
    if "images" not in roles or not {"composite", "answer"} & roles.keys():
        missing = "`answer` or `answer_im`" if "images" in roles else "`images`"
        raise DataError(
            f"no column {missing}; the table has: {', '.join(columns)}",
            where=table.label,
            hint="rows in TaxonRL's format have problem, images, answer and, with intermediate truth, answer_im; a"
            f" table of labelled images has image_path, {', '.join(classes)}; --levels reads a folder's images by their"
            " folders",
        )
    return RowColumns(roles["images"], *(roles.get(role) for role in ("problem", "answer", "composite")))


def read_truth(domain: Domain, answer: Any, composite: Any) -> dict[str, Any]:
    """Return the typed truth of a row: `same`, `distance`, each field as two names, and `ground_truth`.

    `ground_truth` is the published text if writing the typed truth would give another text, else None.

    Raises: RewardError with the error in the text, or when `answer` and `answer_im` contradict each other.
    """
    text = composite if composite not in (None, "") else answer
    layout = LAYOUTS[domain.layout if isinstance(text, str) and ";" in text else "answer"]
    truth = layout.read(text)
    if text is composite and answer not in (None, ""):
        same = LAYOUTS["answer"].read(answer)["same"]
        if same != truth["same"]:
            raise RewardError(f"`answer` says {'same' if same else 'different'}, `answer_im` says the opposite")
    if layout.name == domain.layout and layout.name != "answer" and layout.write(truth) != text:
        truth["ground_truth"] = text
    return complete_truth(domain, truth)


def complete_truth(domain: Domain, truth: Mapping[str, Any]) -> dict[str, Any]:
    """Return a truth with every key of the domain's schema, in the schema's order; unknown values are None."""
    whole: dict[str, Any] = {"same": truth["same"], "distance": truth.get("distance")}
    for name in domain.field_names:
        pair = truth.get(name) or (None, None)
        whole[name] = list(pair)
    if whole["distance"] is None:
        whole["distance"] = truth_distance(domain, whole)
    return whole | {"ground_truth": truth.get("ground_truth")}


@dataclass(frozen=True)
class ScanRows:
    """Function that checks a piece of a table and writes a file with one JSON line per row, for `checked_rows`.

    It is the `Make` of data/parallel_parts.py.
    """

    table: RowFiles
    columns: RowColumns
    domain: str

    def __call__(self, piece: TablePiece, part: Path) -> None:
        lines = []
        for number, row in enumerate(read_piece(piece, self.columns.names)):
            line, faults = self._line(row, EXAMINER)
            if faults:
                line = {"wrong": faults}
            lines.append({**line, "where": self.table.where(piece, number)})
        write_lines(part, lines)

    def _line(self, row: Mapping[str, Any], examiner: Examiner) -> tuple[dict[str, Any], list[str]]:
        faults: list[str] = []
        columns, domain = self.columns, DOMAINS[self.domain]
        problem = row.get(columns.problem) if columns.problem else None
        if columns.problem and (not isinstance(problem, str) or not problem.strip()):
            faults.append(f"`{columns.problem}` is {show(problem, 60)}, not a text")
        truth: dict[str, Any] = {}
        try:
            answer = row.get(columns.answer) if columns.answer else None
            composite = row.get(columns.composite) if columns.composite else None
            truth = read_truth(domain, answer, composite)
        except RewardError as error:
            faults.append(f"{error.message} ({error.hint})" if error.hint else error.message)
        values = split_images(row.get(columns.images))
        marks = problem.count(IMAGE) if isinstance(problem, str) else len(values)
        if len(values) != IMAGES_IN_A_ROW:
            faults.append(f"{len(values)} image{'s' * (len(values) != 1)}, not {IMAGES_IN_A_ROW}")
        elif marks not in (0, len(values)):
            faults.append(f"{len(values)} images, but {marks} {IMAGE} mark{'s' * (marks != 1)} in `{columns.problem}`")
        images = [look_at_cell(value, self.table.root, examiner) for value in values]
        for number, image in enumerate(images, start=1):
            if "reason" in image:
                faults.append(f"image {number}: {image['reason']}")
        return {"truth": truth, "problem": problem, "images": images}, faults


def checked_rows(parts: Sequence[Path], table: RowFiles) -> Iterator[tuple[int, int, str, dict[str, Any]]]:
    """Yield (number of the piece, row in the piece, split, JSON values) of the rows that `ScanRows` wrote, in order."""
    for index, part in enumerate(parts):
        with part.open(encoding="ascii") as lines:
            for number, line in enumerate(lines):
                yield index, number, table.pieces[index].split, json.loads(line)


MAX_BAD = 0.01
VALIDATION_PAIRS = 300
MAX_CUT = 0.1
"""Largest share of the training rows that is moved to the validation split."""
SHOWN_BAD = 5


@dataclass(frozen=True)
class DomainRowPlan:
    """Plan of a dataset from a table.

    Args:
        source: the table, as `locate_rows` accepts it.
        name: name of the dataset.
        seed: seed for the choice of the validation rows.
        validation_pairs: number of training rows to move to validation if the table has no validation split; 0 = none.
        max_bad: largest share of rows that may be left out because they are wrong.
        images_root: folder that paths of images are relative to; None = the table's folder.
    """

    source: str
    name: str
    seed: int = 0
    validation_pairs: int = VALIDATION_PAIRS
    max_bad: float = MAX_BAD
    images_root: Path | None = None


@dataclass
class Survey:
    """Result of reading a table: facts of its sound rows, every image once, and the errors of the other rows.

    Args:
        known: truth field -> number of rows in which the names of both images are known.
    """

    images: list[Examined] = field(default_factory=list)
    places: list[RowPlace] = field(default_factory=list)
    rows: dict[str, list[PlannedRow]] = field(default_factory=lambda: defaultdict(list))
    bad: list[dict[str, Any]] = field(default_factory=list)
    repeated: list[dict[str, Any]] = field(default_factory=list)
    known: Counter[str] = field(default_factory=Counter)
    total: int = 0


def prepare_rows(out: Path, domain: Domain, plan: DomainRowPlan, limits: Limits, *, force: bool = False) -> Prepared:
    """Read, check and write a table of a domain's rows.

    Raises: DataError when it cannot be read, when more than `max_bad` of its rows are wrong, or another dataset is at
        `out`; nothing is written then.
    """
    args = {
        "source": short_source(plan.source),
        "seed": plan.seed,
        "validation_pairs": plan.validation_pairs,
        "max_bad": plan.max_bad,
        **limits.args,
    }
    refuse_other(out, args, force=force)
    located = locate_rows(plan.source, plan.images_root)
    with building(out, key=[domain.name, plan.name, str(plan.images_root), args, located.state]) as build:
        table = open_row_files(located, build.work)
        columns = find_columns(table, classes_of(domain))
        parts = [build.work / f"rows-{i:05d}.jsonl" for i in range(len(table.pieces))]
        scan = ScanRows(table, columns, domain.name)
        make_parts(scan, table.pieces, parts, workers=limits.workers, progress=limits.progress, what="reading rows")
        survey = survey_rows(domain, table, columns, parts)
        refuse_bad(domain, survey, plan.max_bad)
        assembly = Assembly(
            images=survey.images,
            places=survey.places,
            reader=RowReader(table, columns.images),
            rows=dict(survey.rows),
            fields=partial(row_fields, plan.name, table, parts),
            schema=row_schema(domain),
            dropped=[*survey.bad, *survey.repeated],
            group=group_of(domain),
        )
        if survey.bad:
            share_words = f"{len(survey.bad):,} of {survey.total:,} rows ({len(survey.bad) / survey.total:.2%})"
            assembly.notes["rows that are wrong"] = ("look", f"{share_words} left out: dropped.jsonl")
        if some := note_on_names(domain, survey):
            assembly.notes["names in the truth"] = ("look", some)
        if set(assembly.rows) == {"test"}:
            assembly.notes["validation split"] = ("look", "none: the source has a test split alone")
        else:
            cut_validation(assembly, domain, plan)
        info = {
            "name": plan.name,
            "task": domain.name,
            "seed": plan.seed,
            "truth_fields": [name for name in domain.field_names if survey.known[name]],
            "source": {"name": args["source"], "rows": dict(table.splits), "columns": list(columns.names)},
            "args": args,
            "splits": {split: count_pairs(rows) for split, rows in assembly.rows.items()},
            "counts": {"images": len(survey.images), "rows": survey.total},
        }
        return assemble(build, assembly, info, limits, force=force)


def survey_rows(domain: Domain, table: RowFiles, columns: RowColumns, parts: Sequence[Path]) -> Survey:
    """Read the checked rows once: collect facts, and leave out rows that repeat or contradict another row.

    A row that repeats an earlier row of its split (same images, same label) is left out. If a pair of images has the
    label "same" in one row and "different" in another, all rows of this pair are wrong.
    """
    survey, number_of = Survey(), {}
    fields = domain.field_names if columns.composite else ()
    lengths = PromptLengths(domain_task(domain, {"truth_fields": list(fields)}))
    for index, number, split, line in checked_rows(parts, table):
        survey.total += 1
        if "wrong" in line:
            survey.bad.append({"origin": line["where"], "reason": "; ".join(line["wrong"])})
            continue
        truth, images = line["truth"], []
        for position, fields in enumerate(line["images"]):
            known = number_of.get(fields["sha256"])
            if known is None:
                known = number_of[fields["sha256"]] = len(survey.images)
                survey.images.append(examined(fields))
                survey.places.append(RowPlace(index, number, position))
            images.append(known)
        survey.known.update(known_fields(domain, [truth]))
        shown = {"problem": line["problem"]} if columns.problem else {}
        facts = RowFacts(
            tuple(images),
            "same" if truth["same"] else "different",
            truth["distance"],
            lengths.of(shown, [survey.images[i].media for i in images]),
            groups_of(domain, truth),
            line["where"],
        )
        survey.rows[split].append(PlannedRow((index, number), facts))
    _leave_out_repeats(survey)
    return survey


def _leave_out_repeats(survey: Survey) -> None:
    labels: dict[tuple[int, ...], set[str | None]] = defaultdict(set)
    for rows in survey.rows.values():
        for row in rows:
            labels[tuple(sorted(row.facts.images))].add(row.facts.label)
    for split, rows in survey.rows.items():
        kept: dict[tuple[int, ...], PlannedRow] = {}
        for row in rows:
            facts = row.facts
            if len(labels[tuple(sorted(facts.images))]) > 1:
                reason = "the same two images are called the same in one row and different in another"
                survey.bad.append({"origin": facts.name, "reason": reason})
            elif len(set(facts.images)) == 1 and facts.label == "different":
                survey.bad.append({"origin": facts.name, "reason": "one image twice, called different"})
            elif facts.images in kept:
                first = kept[facts.images].facts.name
                survey.repeated.append({"origin": facts.name, "reason": f"the same two images as {first}"})
            else:
                kept[facts.images] = row
        survey.rows[split] = list(kept.values())


def note_on_names(domain: Domain, survey: Survey) -> str:
    """Return a note on the fields that only some rows fill, with the numbers of these rows; "" = no such field."""
    rows = sum(len(rows) for rows in survey.rows.values()) + len(survey.repeated)
    some = {name: survey.known[name] for name in domain.field_names if 0 < survey.known[name] < rows}
    listing = ", ".join(f"{name} in {count:,}" for name, count in some.items())
    return f"of {rows:,} rows {listing}; where a name is missing, it is neither paid for nor counted" if some else ""


def refuse_bad(domain: Domain, survey: Survey, max_bad: float) -> None:
    """Raise a DataError with the first bad rows when their share is above `max_bad`, or no row is sound."""
    sound = sum(len(rows) for rows in survey.rows.values())
    if sound and is_few(len(survey.bad), survey.total, max_bad):
        return
    lines = [f"\n  {bad['origin']}: {bad['reason']}" for bad in survey.bad[:SHOWN_BAD]]
    more = f"\n  ... and {len(survey.bad) - SHOWN_BAD:,} more" if len(survey.bad) > SHOWN_BAD else ""
    share = len(survey.bad) / max(1, survey.total)
    message = f"{len(survey.bad):,} of {survey.total:,} rows ({share:.1%}) are wrong, more than --max-bad {max_bad:g}"
    hint = f"mend the rows, or {leave_out(len(survey.bad), survey.total)}"
    if share > 0.5:
        hint = (
            f"are these rows of the domain `{domain.name}`, are their columns problem, images, answer and answer_im,"
            " and do paths of images lead from the table's folder (else --images-root)?"
        )
    raise DataError(
        f"{message if sound else f'all {survey.total:,} rows are wrong'}; nothing was written:{''.join(lines)}{more}",
        hint=hint,
    )


def group_of(domain: Domain) -> str:
    """Return the truth field that identifies the subject of an image: the finest rank, if the truth has it, or ""."""
    finest = domain.ranks[-1] if domain.ranks else ""
    return finest if finest in domain.field_names else ""


def groups_of(domain: Domain, truth: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the known names in the field `group_of` of a row."""
    name = group_of(domain)
    return tuple(one for one in truth[name] if one is not None) if name else ()


def cut_validation(assembly: Assembly, domain: Domain, plan: DomainRowPlan) -> None:
    """Move rows of `train` to a new split `validation` if there is none, and report it."""
    check = "validation split"
    if "validation" in assembly.rows or "train" not in assembly.rows:
        assembly.notes[check] = ("ok", "the source's own")
        return
    rows = assembly.rows["train"]
    num_rows = min(plan.validation_pairs, int(MAX_CUT * len(rows)))
    for by in (assembly.group, "image"):
        cut = cut_rows(_units(rows, by), num_rows, seed=plan.seed) if by else Cut([], [])
        if cut.taken:
            break
    else:
        why = "none was asked for" if not plan.validation_pairs else "no row can be kept out of training"
        assembly.notes[check] = ("look", f"none: {why}; do not choose checkpoints on the test split")
        return
    taken, lost = set(cut.taken), set(cut.lost)
    assembly.rows = {
        "train": [row for i, row in enumerate(rows) if i not in taken and i not in lost],
        "validation": [rows[i] for i in cut.taken],
        **{split: rows for split, rows in assembly.rows.items() if split != "train"},
    }
    note = f"the source has none: {len(taken):,} rows cut off train, which share no {by} with it"
    if lost:
        note += f"; {len(lost):,} rows with a {by} of both left out"
        reason = f"it has a {by} of the validation rows"
        assembly.dropped += [{"origin": rows[i].facts.name, "reason": reason} for i in cut.lost]
    if len(taken) < plan.validation_pairs:
        note += f" (--validation-pairs is {plan.validation_pairs:,})"
    assembly.notes[check] = ("look", note)


def _units(rows: Sequence[PlannedRow], by: str) -> list[RowUnits]:
    """Return the units of each row that must not be in two splits: the names of its group, or its images.

    The result is [] if a name is unknown.
    """
    if by == "image":
        return [RowUnits(row.facts.images, row.facts.label) for row in rows]
    if any(len(row.facts.groups) < 2 for row in rows):
        return []
    return [RowUnits(row.facts.groups, row.facts.label) for row in rows]


def row_fields(
    name: str, table: RowFiles, parts: Sequence[Path], rows: Sequence[PlannedRow], media: Sequence[Media]
) -> Iterator[dict[str, Any]]:
    """Yield the columns of the rows; their texts are read again from the parts. See `Assembly.fields`."""
    facts_by_key = {row.key: row.facts for row in rows}
    for index, number, _, line in _lines_of(parts, table, facts_by_key):
        facts = facts_by_key[index, number]
        images = [media[i] for i in facts.images]
        yield {
            "prompt_id": pair_id(name, images, facts.name),
            "truth": line["truth"],
            "images": images,
            "problem": line["problem"],
            "origins": [facts.name],
        }


def _lines_of(
    parts: Sequence[Path], table: RowFiles, facts_by_key: Mapping[tuple[int, int], Any]
) -> Iterator[tuple[int, int, str, dict[str, Any]]]:
    pieces = sorted({index for index, _ in facts_by_key})
    for index in pieces:
        with parts[index].open(encoding="ascii") as lines:
            for number, line in enumerate(lines):
                if (index, number) in facts_by_key:
                    yield index, number, table.pieces[index].split, json.loads(line)


def row_schema(domain: Domain, more: str | None = "problem") -> Any:
    """Return the Arrow schema of a domain's rows.

    Args:
        more: name of a further column: `problem` (text) or `individuals` (two names); None = no further column.
    """
    import pyarrow as pa

    names = pa.list_(pa.string())
    truth = [("same", pa.bool_()), ("distance", pa.int64()), *((one, names) for one in domain.field_names)]
    image = pa.struct([("sha256", pa.string()), ("width", pa.int64()), ("height", pa.int64()), ("kind", pa.string())])
    fields = [
        ("prompt_id", pa.string()),
        ("truth", pa.struct([*truth, ("ground_truth", pa.string())])),
        ("images", pa.list_(image)),
        ("origins", names),
    ]
    return pa.schema([*fields, *([(more, pa.string() if more == "problem" else names)] if more else [])])
