"""`vlmrl prep <domain>` from a table in TaxonRL's form (`problem`, `images`, `answer`, `answer_im`).

Every row is checked and gets a typed truth, the splits are kept, and validation rows are separated.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vlmrl.data.dataset_writer import building, refuse_other
from vlmrl.data.doctor import RowFacts
from vlmrl.data.open_dataset import RowUnits
from vlmrl.data.table_pieces import Located, RowFiles
from vlmrl.data.table_values import PAIRS, match_columns, show
from vlmrl.errors import DataError, RewardError
from vlmrl.tasks.dataset_assembly import (
    Limits,
    PlannedRow,
    Prepared,
    PromptLengths,
    assemble,
    row_schema,
    short_source,
)
from vlmrl.tasks.pairs.prep import count_pairs, pair_id
from vlmrl.tasks.prompt import IMAGE
from vlmrl.tasks.table_rows import IMAGES, TRAIN, CheckedTables, check_tables, checked_line, cut_validation
from vlmrl.tasks.taxonrl.domains import DOMAINS, LAYOUTS, Domain, classes_of, known_fields, truth_distance
from vlmrl.tasks.taxonrl.task import domain_task
from vlmrl.types import LeftOut, Media
from vlmrl.untrusted import plural

IMAGES_IN_A_ROW = 2


def find_columns(classes: Sequence[str], table: RowFiles) -> dict[str, str]:
    """Return role -> column of a table, TaxonRL's names first.

    The role `composite` is TaxonRL's `answer_im`: a `;`-separated text with the answer and the names.

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
    return {role: roles[role] for role in (IMAGES, "problem", "answer", "composite") if role in roles}


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


def check_row(
    domain: str, cells: Mapping[str, Any], columns: Mapping[str, str], values: list[Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return truth and problem of a row, and its faults. See `table_rows.Check`."""
    faults: list[str] = []
    problem = cells.get("problem")
    if "problem" in columns and (not isinstance(problem, str) or not problem.strip()):
        faults.append(f"`{columns['problem']}` is {show(problem, 60)}, not a text")
    truth: dict[str, Any] = {}
    try:
        truth = read_truth(DOMAINS[domain], cells.get("answer"), cells.get("composite"))
    except RewardError as error:
        faults.append(f"{error.message} ({error.hint})" if error.hint else error.message)
    marks = problem.count(IMAGE) if isinstance(problem, str) else len(values)
    if len(values) != IMAGES_IN_A_ROW:
        faults.append(f"{len(values)} image{plural(len(values))}, not {IMAGES_IN_A_ROW}")
    elif marks not in (0, len(values)):
        name = columns.get("problem")
        faults.append(f"{len(values)} images, but {marks} {IMAGE} mark{plural(marks)} in `{name}`")
    return {"truth": truth, "problem": problem}, faults


@dataclass(frozen=True)
class DomainRequest:
    """Dataset that `vlmrl prep <domain>` is to make.

    Args:
        source: a table, a folder, an archive, or `hub:name`.
        num_pairs: split -> number of pairs to make from raw images. For a table, only `validation` is used: so many
            training rows become validation rows if it has none; 0 = none.
        levels: meaning of the folders above a raw image, outermost first; None = the domain's own levels.
        max_bad: largest share of rows or images that may be left out because they are wrong.
    """

    domain: Domain
    name: str
    out: Path
    source: str
    seed: int
    num_pairs: Mapping[str, int]
    levels: Sequence[str] | None
    max_bad: float
    images_root: Path | None


def prepare_rows(request: DomainRequest, located: Located, limits: Limits) -> Prepared:
    """Read, check and write a table of a domain's rows.

    Raises: DataError when it cannot be read, when more than `max_bad` of its rows are wrong, or another dataset is at
        `out`; nothing is written then.
    """
    domain, name = request.domain, request.name
    validation_pairs = request.num_pairs["validation"]
    args = {
        "source": short_source(request.source),
        "seed": request.seed,
        "validation_pairs": validation_pairs,
        "max_bad": request.max_bad,
        **limits.args,
    }
    refuse_other(request.out, args, force=limits.force)
    with building(request.out, key=[domain.name, name, str(request.images_root), args, located.state]) as build:
        find, make = partial(find_columns, classes_of(domain)), partial(checked_line, partial(check_row, domain.name))
        checked = check_tables(build.work, [located], find, make, limits)
        (table,) = checked.tables
        known = survey_rows(domain, checked)
        checked.refuse_bad(
            request.max_bad,
            f"are these rows of the domain `{domain.name}`, are their columns problem, images, answer and answer_im,"
            " and do paths of images lead from the table's folder (else --images-root)?",
            share=True,
        )
        assembly = checked.assembly(partial(row_fields, name), domain_schema(domain))
        assembly.group = group_of(domain)
        if some := note_on_names(domain, checked, known):
            assembly.notes["names in the truth"] = ("look", some)
        train = assembly.rows.get(TRAIN, [])
        by_image = [RowUnits(row.facts.images, row.facts.label) for row in train]
        by_group = [RowUnits(row.facts.groups, row.facts.label) for row in train]
        all_named = assembly.group and all(len(row.facts.groups) > 1 for row in train)
        units = {**({assembly.group: by_group} if all_named else {}), "image": by_image}
        shares, option = "it has a {by} of the validation rows", "--validation-pairs"
        cut_validation(assembly, units, validation_pairs, request.seed, shares=shares, option=option)
        info = {
            "name": name,
            "task": domain.name,
            "seed": request.seed,
            "truth_fields": [name for name in domain.field_names if known[name]],
            "source": {"name": args["source"], "rows": table.files.splits, "columns": list(table.columns.values())},
            "args": args,
            "splits": {split: count_pairs(rows) for split, rows in assembly.rows.items()},
            "counts": {"images": len(checked.images), "rows": checked.total},
        }
        return assemble(build, assembly, info, limits)


def survey_rows(domain: Domain, checked: CheckedTables) -> Counter[str]:
    """Read the checked rows once: collect facts in `checked`, and leave out rows that repeat or contradict another row.

    A row that repeats an earlier row of its split (same images, same label) is left out. If a pair of images has the
    label "same" in one row and "different" in another, all rows of this pair are wrong.

    Returns: truth field -> number of rows in which the names of both images are known.
    """
    known = Counter[str]()
    columns = checked.tables[0].columns
    fields = domain.field_names if "composite" in columns else ()
    lengths = PromptLengths(domain_task(domain, {"truth_fields": list(fields)}))
    for split, key, line, images in checked.sound_lines():
        truth = line["truth"]
        known.update(known_fields(domain, [truth]))
        shown = {"problem": line["problem"]} if "problem" in columns else {}
        facts = RowFacts(
            images,
            "same" if truth["same"] else "different",
            truth["distance"],
            lengths.of(shown, [checked.images[i].media for i in images]),
            groups_of(domain, truth),
            line["where"],
        )
        checked.rows[split].append(PlannedRow(key, facts))
    _leave_out_repeats(checked)
    return known


def _leave_out_repeats(checked: CheckedTables) -> None:
    labels: dict[tuple[int, ...], set[str | None]] = defaultdict(set)
    for rows in checked.rows.values():
        for row in rows:
            labels[tuple(sorted(row.facts.images))].add(row.facts.label)
    for split, rows in checked.rows.items():
        kept: dict[tuple[int, ...], PlannedRow] = {}
        for row in rows:
            facts = row.facts
            if len(labels[tuple(sorted(facts.images))]) > 1:
                reason = "the same two images are called the same in one row and different in another"
                checked.bad.append(LeftOut(facts.name, reason))
            elif len(set(facts.images)) == 1 and facts.label == "different":
                checked.bad.append(LeftOut(facts.name, "one image twice, called different"))
            elif facts.images in kept:
                first = kept[facts.images].facts.name
                checked.repeated.append(LeftOut(facts.name, f"the same two images as {first}"))
            else:
                kept[facts.images] = row
        checked.rows[split] = list(kept.values())


def note_on_names(domain: Domain, checked: CheckedTables, known: Mapping[str, int]) -> str:
    """Return a note on the fields that only some rows fill, with the numbers of these rows; "" = no such field."""
    rows = sum(len(rows) for rows in checked.rows.values()) + len(checked.repeated)
    some = {name: known[name] for name in domain.field_names if 0 < known[name] < rows}
    listing = ", ".join(f"{name} in {count:,}" for name, count in some.items())
    return f"of {rows:,} rows {listing}; where a name is missing, it is neither paid for nor counted" if some else ""


def group_of(domain: Domain) -> str:
    """Return the truth field that identifies the subject of an image: the finest rank, if the truth has it, or ""."""
    finest = domain.ranks[-1] if domain.ranks else ""
    return finest if finest in domain.field_names else ""


def groups_of(domain: Domain, truth: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the known names in the field `group_of` of a row."""
    name = group_of(domain)
    return tuple(one for one in truth[name] if one is not None) if name else ()


def row_fields(name: str, facts: RowFacts, line: Mapping[str, Any], images: Sequence[Media]) -> dict[str, Any]:
    """Return the columns of a row. See `CheckedTables.assembly`."""
    return {
        "prompt_id": pair_id(name, images, facts.name),
        "truth": line["truth"],
        "images": images,
        "problem": line["problem"],
        "origins": [facts.name],
    }


def domain_schema(domain: Domain, more: str | None = "problem") -> Any:
    """Return the Arrow schema of a domain's rows.

    Args:
        more: name of a further column: `problem` (text) or `individuals` (two names); None = no further column.
    """
    import pyarrow as pa

    names = pa.list_(pa.string())
    truth = [("same", pa.bool_()), ("distance", pa.int64()), *((one, names) for one in domain.field_names)]
    columns = [(more, pa.string() if more == "problem" else names)] if more else []
    return row_schema([*truth, ("ground_truth", pa.string())], ("origins", names), *columns)
