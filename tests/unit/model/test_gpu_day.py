"""The GPU day: parts that end in time and fail alone, honest results, and every part at a toy size on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import warm

ROOT = Path(__file__).resolve().parents[3]
BENCH = ROOT / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

import gpu_day  # noqa: E402
import gpu_kernels  # noqa: E402
from gpu_day import PARTS, PROJECT_BYTES, Measure, Part, carried, is_finished, read_lines, run_parts, tables  # noqa: E402
from gpu_profile import covered  # noqa: E402

FAKE = """
import os, subprocess, sys, time

def good(smoke, size=1):
    print("talk")
    yield {"case": "first", "figure": 1.5 * size, "ok": True}
    yield {"case": "second", "figure": 2.5, "ok": False, "note": "a | b"}

def broken(smoke):
    yield {"case": "before", "figure": 1.0}
    raise ValueError("no kernel for this")

def hanging(smoke):
    code = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(code, start_new_session=True)
    open(os.environ["PIDS"], "w").write(f"{os.getpid()} {child.pid}")
    yield {"case": "before", "figure": 1.0}
    time.sleep(600)

def cached(smoke):
    yield {"case": os.environ["TORCHINDUCTOR_CACHE_DIR"], "inside": os.environ["TMPDIR"]}

def killed(smoke):
    yield {"case": "before", "figure": 1.0}
    os.kill(os.getpid(), 9)
"""


def part(*measures: Measure, call: int = 1) -> Part:
    return Part("a test", call, measures, {"figure": ("figure", ".1f"), "never": ("never", "")}, "it is so")


def measure(name: str, seconds: int = 60, **args: object) -> Measure:
    return Measure(name, f"fake:{name}", seconds, args=args)


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Path:
    """A folder whose module `fake` measurements may name; facts are not asked of another process."""
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_day, "facts_of", lambda smoke: {"device": "Fake 1", "torch": "2", "smoke": smoke})
    return tmp_path


def use(monkeypatch, **parts: Part) -> None:
    monkeypatch.setattr(gpu_day, "PARTS", parts)


def outcomes(path: Path) -> list[tuple[str, str]]:
    return [(r["case"], r["outcome"]) for r in read_lines(path, False)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_four_calls_of_nine_minutes_and_thirty_three_in_all():
    seconds = dict.fromkeys((1, 2, 3, 4), 0)
    for p in PARTS.values():
        seconds[p.call] += sum(m.limit_seconds for m in p.measures)
    assert max(seconds.values()) <= 60 * gpu_day.CALL_MINUTES and sum(seconds.values()) <= 33 * 60
    assert all(len({m.name for m in p.measures}) == len(p.measures) for p in PARTS.values())


def test_one_failing_measurement_stops_no_other(fake, monkeypatch, capsys):
    use(monkeypatch, a=part(measure("broken"), measure("good", size=2)), b=part(measure("killed"), measure("good")))
    out = fake / "day.jsonl"
    assert run_parts(["a", "b"], out, 9, False)
    assert outcomes(out) == [
        ("before", "done"),
        ("broken", "failed, exit code 1"),
        ("first", "done"),
        ("second", "done"),
        ("before", "done"),
        ("killed", "failed, exit code 137"),
        ("first", "done"),
        ("second", "done"),
    ]
    [failed] = [r for r in read_lines(out, False) if r["outcome"] == "failed, exit code 1"]
    assert failed["note"] == "ValueError: no kernel for this" and failed["device"] == "Fake 1"
    assert "talk" in out.with_suffix(".log").read_text() and "a/second: done NOT OK" in capsys.readouterr().err
    assert read_lines(out, False)[2]["figure"] == 3.0


@pytest.mark.slow
def test_a_measurement_that_hangs_is_ended_with_what_it_started(fake, monkeypatch):
    monkeypatch.setenv("PIDS", str(fake / "pids"))
    use(monkeypatch, a=part(measure("hanging", seconds=3)), b=part(measure("good", seconds=60)))
    assert run_parts(["a", "b"], fake / "day.jsonl", 64 / 60, False)
    assert outcomes(fake / "day.jsonl")[:2] == [("before", "done"), ("hanging", "not done in 4 s")]
    pids = [int(pid) for pid in (fake / "pids").read_text().split()]
    end = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, pids))


DAY = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
import gpu_day
gpu_day.facts_of = lambda smoke: {"device": "Fake 1", "torch": "2", "smoke": smoke}
gpu_day.PARTS["kernels"] = gpu_day.Part("a test", 1, (gpu_day.Measure("hanging", "fake:hanging", 600),), {})
gpu_day.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_day_that_is_killed_leaves_no_process_and_no_files(fake, number):
    """All that a measurement started goes too, even in a session of its own."""
    command = [sys.executable, "-c", DAY, str(BENCH), "--smoke", "--part", "kernels", "--out", str(fake / "day.jsonl")]
    temporary = fake / "temporary"
    temporary.mkdir()
    environment = os.environ | {"PIDS": str(fake / "pids"), "TMPDIR": str(temporary)}
    day = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not (pids := (fake / "pids").read_text().split() if (fake / "pids").exists() else []):
        assert time.monotonic() < end and day.poll() is None
        time.sleep(0.05)
    day.send_signal(number)
    _, shown = day.communicate(timeout=60)
    assert shown == ("" if number == signal.SIGKILL else "interrupted; the same command goes on there\n")
    end = time.monotonic() + 20
    while (any(alive(int(pid)) for pid in pids) or list(temporary.iterdir())) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(int(pid)) for pid in pids) and not list(temporary.iterdir())


def test_all_measurements_share_one_inductor_cache_but_those_that_time_compiling(fake, monkeypatch):
    monkeypatch.delenv(gpu_day.CACHE, raising=False)
    timed = Measure("timed", "fake:cached", 60, times_compiling=True)
    use(monkeypatch, a=part(measure("cached"), timed), b=part(measure("cached")))
    out = fake / "day.jsonl"
    run_parts(["a", "b"], out, 9, False)
    first, own, second = read_lines(out, False)
    assert first["case"] == second["case"] == str(Path.home() / ".cache" / "vlmrl-gpu-day")
    assert first["inside"] != second["inside"] and own["case"].startswith(own["inside"])
    monkeypatch.setenv(gpu_day.CACHE, str(fake / "mine"))
    run_parts(["a"], fake / "other.jsonl", 9, False)
    assert [r["case"] == str(fake / "mine") for r in read_lines(fake / "other.jsonl", False)] == [True, False]
    assert {m.name for p in PARTS.values() for m in p.measures if m.times_compiling} == {"flex", "graphs"}


def test_what_the_end_of_a_call_cuts_off_is_left_for_the_next_one(fake, monkeypatch, capsys):
    """Limits of 600 s and a call of 21 s: the first is cut off and not noted, and no time is left for the second."""
    monkeypatch.setenv("PIDS", str(fake / "pids"))
    out, limits = fake / "day.jsonl", []
    use(monkeypatch, a=part(measure("hanging", seconds=600), measure("good", seconds=600)))

    def apart(part, measures, smoke, seconds, log):
        limits.append(round(seconds))
        now[0] += seconds
        return [{"case": "hanging", "outcome": f"not done in {seconds:.0f} s", "ok": None, "note": ""}]

    now = [100.0]
    monkeypatch.setattr(gpu_day, "run_apart", apart)
    monkeypatch.setattr(gpu_day.time, "monotonic", lambda: now[0])
    assert not run_parts(["a"], out, 21 / 60, False) and limits == [21] and not out.exists()
    assert "no time left for a/good; the same command goes on there" in capsys.readouterr().err


def test_time_that_is_left_over_goes_to_who_needs_it(fake, monkeypatch):
    """Limits of 60, 30 and 30 s in a call of 200 s: 200 - 60 = 140 for the first; it takes 20, and 150 are left."""
    limits, now = [], [0.0]
    use(monkeypatch, a=part(measure("good", 60), measure("broken", 30)), b=part(measure("good", 30)))

    def apart(part, measures, smoke, seconds, log):
        limits.append(round(seconds))
        now[0] += 20
        return [
            {
                "part": part,
                "measure": measures[0].name,
                "case": "x",
                "outcome": "done",
                "ok": None,
                "note": "",
                "smoke": smoke,
            }
        ]

    monkeypatch.setattr(gpu_day, "run_apart", apart)
    monkeypatch.setattr(gpu_day.time, "monotonic", lambda: now[0])
    assert run_parts(["a", "b"], fake / "day.jsonl", 200 / 60, False) and limits == [140, 150, 160]


def test_a_missing_library_is_said_and_nothing_is_started(fake, monkeypatch):
    use(monkeypatch, a=part(Measure("good", "fake:good", 60, ("torch", "not_a_module", "json"))))
    assert run_parts(["a"], fake / "day.jsonl", 9, False)
    assert outcomes(fake / "day.jsonl") == [("good", "skipped: needs not_a_module")]


def test_the_same_command_goes_on_and_tries_failures_again(fake, monkeypatch):
    out = fake / "day.jsonl"
    use(monkeypatch, a=part(measure("broken"), measure("good")))
    run_parts(["a"], out, 9, False)
    first = out.read_text()
    (fake / "fake.py").write_text(FAKE.replace('raise ValueError("no kernel for this")', ""))
    run_parts(["a"], out, 9, False)
    assert out.read_text().startswith(first)
    added = [json.loads(line) for line in out.read_text()[len(first) :].splitlines()]
    assert [(r["measure"], r["attempt"]) for r in added] == [("broken", 2)]
    assert outcomes(out) == [("first", "done"), ("second", "done"), ("before", "done")], "older attempts are history"
    run_parts(["a"], out, 9, False)
    assert len(out.read_text().splitlines()) == len(first.splitlines()) + 1


def test_too_little_memory_is_a_result():
    assert is_finished([{"outcome": "OOM at 79.0 GiB"}]) and not is_finished([])
    assert not any(
        is_finished([{"outcome": o}]) for o in ("failed, exit code 1", "not done in 4 s", "skipped: needs x")
    )


def test_the_table_names_the_device_and_leaves_out_empty_columns(fake, monkeypatch):
    use(monkeypatch, a=part(measure("good"), measure("killed")))
    out = fake / "day.jsonl"
    run_parts(["a"], out, 9, False)
    assert tables(read_lines(out, False)).splitlines() == [
        "**a** (Fake 1): a test. Ok: it is so.",
        "",
        "| case | outcome | ok | figure | note |",
        "| --- | --- | --- | --- | --- |",
        "| first | done | yes | 1.5 |  |",
        "| second | done | **no** | 2.5 | a / b |",
        "| before | done | - | 1.0 |  |",
        "| killed | failed, exit code 137 | - | - | it printed nothing |",
    ]


@pytest.mark.slow
def test_what_is_carried_is_the_closure_without_what_is_there():
    pins = dict(line.split("==") for line in carried(list(PARTS), []))
    assert {"pydantic", "pydantic-core", "peft", "typer", "pyarrow", "detect-secrets"} <= pins.keys()
    assert not {"torch", "transformers", "torchvision", "numpy", "pytest", "vllm", "datasets"} & pins.keys()
    assert not {"pyarrow", "peft"} & dict(p.split("==") for p in carried(list(PARTS), ["pyarrow", "PEFT"])).keys()
    assert carried(["kernels"], []) == []


def test_wheels_are_imported_from_their_folder(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "carried_thing-1.0-py3-none-any.whl", "w") as file:
        file.writestr("carried_thing.py", "WORD = 'here'")
    code = (
        f"import sys; sys.path.insert(0, {str(BENCH)!r}); import gpu_day; from pathlib import Path\n"
        f"gpu_day.use_wheels(Path({str(tmp_path)!r})); gpu_day.use_wheels(Path({str(tmp_path)!r}))\n"
        "import os, carried_thing; print(carried_thing.WORD, 'unpacked' in os.environ['PYTHONPATH'])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "here True\n"


def test_wheels_that_cannot_be_carried_are_refused_before_anything_runs(tmp_path, monkeypatch):
    with (tmp_path / "large-1.0-py3-none-any.whl").open("wb") as file:
        file.truncate(gpu_day.CARRIED_BYTES - gpu_day.PROJECT_BYTES)
    gpu_day.check_size(tmp_path)
    (tmp_path / "more-1.0-py3-none-any.whl").write_bytes(b"x")
    monkeypatch.setattr(sys, "argv", ["gpu-day", "--smoke", "--wheels", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"take 46\.0 MiB; 46 MiB can be carried beside the project"):
        gpu_day.main()


def test_the_project_takes_no_more_of_what_is_carried_than_is_planned():
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert sum((ROOT / n).lstat().st_size for n in names.split("\0") if n and (ROOT / n).exists()) <= PROJECT_BYTES


def test_a_smoke_run_with_a_line_that_is_not_ok_is_an_error(fake, monkeypatch, capsys):
    use(monkeypatch, a=part(measure("good")))
    monkeypatch.setattr(sys, "argv", ["gpu-day", "--smoke", "--out", str(fake / "day.jsonl")])
    with pytest.raises(SystemExit, match="a line above is not done, or not ok"):
        gpu_day.main()
    assert "| second | done | **no** |" in capsys.readouterr().out


FAKE_TOOL = """#!/usr/bin/env bash
printf '%s ' "$(basename "$0")" "$@" >> "$LOG"; echo >> "$LOG"
[ "$1" != venv ] || { mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python"; }
"""


def test_the_bare_environment_has_what_a_lent_machine_has_and_runs_every_part(tmp_path):
    for name in ("uv", "project-python"):
        (tmp_path / name).write_text(FAKE_TOOL)
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "LOG": str(tmp_path / "log"),
        "PYTHON": "./project-python",
    }
    command = [ROOT / "scripts" / "gpu-day", "--bare", "new/folder", "python3.12"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    folder, script = tmp_path / "new" / "folder", BENCH / "gpu_day.py"
    assert (tmp_path / "log").read_text().splitlines() == [
        f"uv venv --quiet --seed --python python3.12 {folder}/env ",
        f"uv pip install --quiet --python {folder}/env/bin/python torch==2.11.* torchvision transformers==5.17.* "
        + " ".join(gpu_day.USUALLY_THERE)
        + " ",
        f"project-python {script} --carry ",
        f"python -m pip download --quiet --no-deps --only-binary :all: -r {folder}/carry.txt -d {folder}/wheels ",
        f"python {script} --smoke --wheels {folder}/wheels --out {folder}/gpu-day.jsonl ",
    ]


@pytest.mark.slow
def test_no_gpu_is_an_error_with_words(tmp_path):
    done = subprocess.run(
        [ROOT / "scripts" / "gpu-day", "--out", tmp_path / "day.jsonl", "--part", "kernels"],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable},
    )
    assert done.returncode == 1 and "torch sees no GPU" in done.stderr and not (tmp_path / "day.jsonl").exists()


def test_the_union_of_intervals():
    assert covered([(0, 2), (1, 3), (5, 6)]) == 4 and covered([]) == 0 and covered([(0, 9), (1, 2), (3, 4)]) == 9


def test_the_oracle_is_a_plain_softmax_over_what_a_token_may_see():
    """Prompt of 2, responses of 2 and 1, then a prompt of 1: who sees whom, by hand; and with a window of 2."""
    layout = gpu_kernels.layout_of([(2, (2, 1)), (1, ())])
    sees = gpu_kernels.visible(layout, None, torch.device("cpu")).int().tolist()
    assert sees == [
        [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1],
    ]  # fmt: skip
    windowed = gpu_kernels.visible(layout, 2, torch.device("cpu")).int().tolist()
    assert windowed == [
        [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0],
        [0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1],
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rows", [gpu_kernels.varlen_rows, gpu_kernels.flex_rows, gpu_kernels.vision_towers])
def test_a_wrong_mask_is_not_ok(rows, monkeypatch):
    from vlmrl.model import attention

    for name in ("_kernel", "_takes_kernel"):
        monkeypatch.setattr(attention, name, getattr(attention, name))  # put back afterwards
    assert all(row["ok"] for row in rows(True))
    exact = gpu_kernels.oracle

    def shifted(query, key, value, sees, scale):
        return exact(query, key, value, sees.roll(1, 1) | torch.eye(len(sees)).bool(), scale)

    monkeypatch.setattr(gpu_kernels, "oracle", shifted)
    found = list(rows(True))
    assert found and not any(row["ok"] for row in found if row["error_stock"] < 1e-3)
    assert all(row["error_out"] > 0.01 for row in found)


NESTED = f"""
import sys
sys.path[:0] = {[str(BENCH), str(ROOT / "tests")]!r}
import gpu_day, warm

def nested(*arguments):
    go_on_watched(*arguments)
    warm.nest(all_processes=True)

if __name__ == "__main__":
    go_on_watched, gpu_day.go_on_watched, gpu_day.__file__ = gpu_day.go_on_watched, nested, __file__
    gpu_day.main()
"""
"""The script, for a process that forks: what each measurement starts in its turn is a fork, too."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        ["kernels", "speed", "updates", "parity"],
        ["compiled", "profile", "sharding", "transport"],
        ["checkpoints", "runs"],
    ],
)
def test_every_part_runs_at_a_toy_size(tmp_path, parts):
    out = tmp_path / "day.jsonl"
    (tmp_path / "nested.py").write_text(NESTED)
    command = [sys.executable, tmp_path / "nested.py", "--smoke", "--out", out, "--part", *parts]
    done = warm.run(command, capture_output=True, text=True, env=os.environ | {warm.NEST: "all"})
    assert done.returncode == 0, done.stderr[-2000:]
    rows = read_lines(out, True)
    log = out.with_suffix(".log").read_text()
    assert {r["outcome"] for r in rows} == {"done"}, log[-3000:]
    assert not [r for r in rows if r["ok"] is False], log[-3000:]
    assert {(r["part"], r["measure"]) for r in rows} == {(p, m.name) for p in parts for m in PARTS[p].measures}
    assert all(f"**{p}** (CPU)" in done.stdout for p in parts)
    assert ("predicted   measured   ratio" in log) == ("compiled" in parts)
