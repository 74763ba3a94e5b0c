"""Run folders of a stranger: pipes, devices, links and damaged records in every file, in every command that reads."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import Done, this_process
from small_runs import copy_digits

from vlmrl.errors import StoreError
from vlmrl.store.runs import open_run

DATA = Path(__file__).parents[1] / "data" / "run-75082c1"
SHOWN: tuple[tuple[str, ...], ...] = (
    ("runs", "show", "RUN"),
    ("runs", "verify", "RUN"),
    ("runs", "pack", "RUN", "-o", "packed.tar.gz", "--checkpoints", "all"),
    ("runs", "diagnose", "RUN"),
    ("runs", "prune", "RUN", "--keep-last", "1", "--media", "--keep-rollouts", "1"),
    ("compare", "RUN", "adapter"),
    ("report", "RUN", "-o", "report.html"),
    ("reward-check", "RUN"),
)
USED: tuple[tuple[str, ...], ...] = (
    ("eval", "RUN", "--max-rows", "1", "--force"),
    ("merge", "RUN", "--out", "merged", "--force", "--skip-proof"),
    ("train", "--resume", "RUN", "--set", "train.steps=2"),
)
DOCUMENTED = {"diagnose": {0, 2, 3, 4}, "reward-check": {0, 2, 3, 4}}
"""Command -> its exit codes besides 0 and 2."""


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the model, the reward and the runs `old`, `trained` and `adapter`."""
    place = tmp_path_factory.mktemp("stranger") / "project"
    shutil.copytree(DATA, place)
    copy_digits(place / "digits", 8)
    return place


@pytest.fixture
def project(origin: Path, tmp_path: Path) -> Path:
    place = tmp_path / "project"
    shutil.copytree(origin, place)
    for file in place.glob("runs/*/manifest.json"):
        file.write_text(file.read_text("utf-8").replace("/project", str(place)), "utf-8")
    return place


def run_dir(project: Path, name: str = "trained") -> Path:
    return open_run(project / "runs", name).dir


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Fail where a command waits, as for the writer of a pipe."""

    def fail(*_: object) -> None:
        raise AssertionError("the command waits")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def ended(words: tuple[str, ...], run: Path) -> Done:
    """Run a command on a run; it must end with a code that is documented, and without a traceback."""
    with limited(240):
        done = this_process(*(str(run) if word == "RUN" else word for word in words), cwd=run.parent.parent)
    codes = DOCUMENTED.get(words[-2]) or DOCUMENTED.get(words[0], {0, 2})
    assert done.code in codes and "Traceback" not in done.err, (words, done.code, done.err[-2000:])
    return done


def listed(project: Path) -> str:
    done = ended(("runs", "list"), project / "runs" / "any")
    assert done.code == 0
    return done.out


def files_of(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*") if path.is_file())


def put(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "/etc/passwd")


def test_no_command_opens_a_pipe_a_device_or_a_link_out_of_a_run(project: Path):
    """Every file of a run in turn, each kind of entry, and all commands in turn; then all commands on one."""
    run, kinds = run_dir(project), ("pipe", "device", "outside")
    commands = (*SHOWN, *USED)
    for number, path in enumerate(files_of(run)):
        content = path.read_bytes()
        put(path, kinds[number % 3])
        done = ended(commands[number % len(commands)], run)
        assert done.code == 2 and path.name in done.err, (path, done)
        if path.name == "manifest.json":
            assert listed(project).count("damaged") == 1 and "adapter" in listed(project)
        path.unlink()
        path.write_bytes(content)
    put(run / "metrics.jsonl", "pipe")
    assert all(ended(words, run).code == 2 for words in commands)
    assert "adapter" in listed(project) and "trained" in listed(project)
    with pytest.raises(StoreError, match="is a named pipe"):
        open_run(project / "runs", "trained")
    assert open_run(project / "runs", "adapter").metrics()


def test_a_link_within_a_run_is_no_link_out_of_it_and_verify_names_all_others(project: Path):
    run = run_dir(project)
    (run / "logs" / "latest").symlink_to("attempt-1")
    assert ended(("runs", "verify", "RUN"), run).code == 0
    (run / "logs" / "a").symlink_to(run.parent)
    (run / "logs" / "b").symlink_to("../../../reward.py")
    done = ended(("runs", "verify", "RUN"), run)
    assert done.code == 2 and done.err.count("is a link that leads outside the run") == 2


VALUES: tuple[Any, ...] = (
    *(5, -1, 10**40, 1e308, "\u00b2", "x", None, True, [], [5], ["a"], {}, {"a": [5]}, {"x": {"y": None}}, [[[]]]),
    *("9" * 400, "../../x", "/dev/zero", "\ud800"),
)


def mutated(value: Any, rng: random.Random) -> Any:
    """Return a JSON value in which another value stands in one place, or in which a key is missing."""
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            collect(node[key])

    collect(value)
    if not places or rng.random() < 0.05:
        return rng.choice(VALUES)
    node, key = rng.choice(places)
    if rng.random() < 0.15:
        del node[key]
    else:
        node[key] = rng.choice(VALUES)
    return value


def mutate_json(path: Path, rng: random.Random) -> None:
    path.write_text(json.dumps(mutated(json.loads(path.read_text("utf-8")), rng)), "utf-8")


def mutate_lines(path: Path, rng: random.Random) -> None:
    lines = path.read_text("utf-8").splitlines()
    number = rng.randrange(len(lines))
    lines[number] = json.dumps(mutated(json.loads(lines[number]), rng))
    path.write_text("\n".join(lines) + "\n", "utf-8")


def mutate_table(path: Path, rng: random.Random) -> None:
    """Exchange a column for one of another type, with another value or with nulls; or remove it, or all rows."""
    table = pq.read_table(path)
    at, rows = rng.randrange(table.num_columns), len(table)
    name, metadata = table.column_names[at], dict(table.schema.metadata or {})
    kinds = [[5], ["x"], [None], [[5]], [float("nan")], [{"a": 1}], [b"\xff"], ["[5]"], ['{"a": [5]}'], ["\u00b2"]]
    columns = [pa.array(kind * rows) for kind in kinds] + [pa.nulls(rows, table.schema.field(at).type)]
    changes: list[Callable[[], Any]] = [
        lambda: table.remove_column(at),
        lambda: table.slice(0, 0),
        lambda: pa.concat_tables([table, table]),
        *[lambda column=column: table.set_column(at, name, column) for column in columns],
    ]
    if rng.random() < 0.1:
        metadata[b"vlmrl.schema"] = "\u00b2".encode()
    metadata.pop(b"ARROW:schema", None)
    pq.write_table(rng.choice(changes)().replace_schema_metadata(metadata), path)


def mutate_bytes(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes()) or bytearray(b"?")
    for _ in range(rng.choice((1, 3, 30))):
        content[rng.randrange(len(content))] = rng.randrange(256)
    changes = (content, content[: rng.randrange(len(content))], b"\xff\xfe" + content, rng.randbytes(50))
    path.write_bytes(rng.choice(changes))


def seal_checkpoints(run: Path) -> None:
    """Make the hashes of the checkpoints right again, as a stranger would."""
    for meta in run.glob("checkpoints/*/meta.json"):
        try:
            value = json.loads(meta.read_bytes())
            for name in value["files"]:
                content = (meta.parent / name).read_bytes()
                value["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            meta.write_text(json.dumps(value))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass  # the table itself is what was mutated
        (meta.parent / "COMPLETE").write_text(hashlib.sha256(meta.read_bytes()).hexdigest())


MUTATIONS = {".json": mutate_json, ".jsonl": mutate_lines, ".parquet": mutate_table}


def spoil(run: Path, paths: list[Path], rng: random.Random) -> str:
    path = rng.choice(paths)
    mutate = MUTATIONS.get(path.suffix, mutate_bytes) if rng.random() < 0.7 else mutate_bytes
    mutate(path, rng)
    if "checkpoints" in path.parts:
        seal_checkpoints(run)
    return f"{path.relative_to(run)} by {mutate.__name__}"


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_record_is_an_error_or_a_note_and_hides_no_other_run(project: Path, seed: int):
    """A wrong value, type or byte in a record of a run: what is shown of it, and the list of all runs."""
    rng = random.Random(seed)
    run = run_dir(project, rng.choice(("trained", "old")))
    paths = [path for path in files_of(run) if path.suffix != ".safetensors" and "hf" not in path.parts]
    what = spoil(run, paths, rng)
    print(what)
    assert "adapter" in listed(project)
    for words in rng.sample(SHOWN, 3):
        ended(words, run)


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_run_is_not_trained_on_nor_evaluated_with_a_traceback(project: Path, seed: int):
    rng = random.Random(1000 + seed)
    run = run_dir(project)
    print(spoil(run, [path for path in files_of(run) if "eval" not in path.parts], rng))
    ended(USED[seed % len(USED)], run)


@pytest.mark.parametrize(
    "name", ["manifest.json", "metrics.jsonl", "resolved.json", "eval/validation-digits-step-000001/summary.json"]
)
def test_verify_reads_what_is_no_text_and_no_number(project: Path, name: str):
    """Invalid UTF-8, and digits that `int` does not read."""
    run = run_dir(project)
    for content in (b"\xff\xfe{}", '{"step": "\u00b2"}\n'.encode()):
        (run / name).write_bytes(content)
        assert ended(("runs", "verify", "RUN"), run).code == 2
