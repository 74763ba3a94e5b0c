"""Rewards that fork, print, close, replace, hang and leave things behind: right score or an error, for their row alone.

All attacks stand in one file and are scored in one call, each between rows that must not notice. What an attack leaves
behind (an alarm, a thread, a child) then meets the rows after it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from processes import assert_all_gone, below, lives

from vlmrl.errors import RewardError
from vlmrl.types import RewardInput

RIGHT = 0.25
CAN_MOUNT = shutil.which("unshare") and not os.geteuid() and not subprocess.run(["unshare", "-m", "true"]).returncode
ATTACKS = {
    "fork, both return": ("os.fork()", RIGHT),
    "fork, child exits": ("if os.fork() == 0: os._exit(3)", RIGHT),
    "fork, child raises": ("if os.fork() == 0: raise ValueError", RIGHT),
    "fork, child leaves by sys.exit": ("if os.fork() == 0: sys.exit(0)", RIGHT),
    "fork, child returns another score": ("if os.fork() == 0: return 9.0", RIGHT),
    "fork, child sleeps": ("if os.fork() == 0: time.sleep(60)", RIGHT),
    "fork, child returns later": ("if os.fork() == 0: time.sleep(0.2)", RIGHT),
    "a bomb that doubles": ("for _ in range(11): os.fork()\ntime.sleep(60)", ("more than 512", "no answer within 2 s")),
    "a daemon": (
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.closerange(0, 4096)\n"
        "        time.sleep(60)\n    os._exit(0)",
        RIGHT,
    ),
    "a program in the background": ("subprocess.Popen(['sleep', '60'], start_new_session=True)", RIGHT),
    "a pool of processes": (
        "with multiprocessing.get_context('fork').Pool(2) as pool: assert pool.map(abs, [-1, -2]) == [1, 2]",
        RIGHT,
    ),
    "threads that print": (
        "for _ in range(4): threading.Thread(target=lambda: [print('x' * 999) for _ in range(99)]).start()",
        RIGHT,
    ),
    "a thread that writes to all descriptors": ("threading.Thread(target=scribble, daemon=True).start()", None),
    "garbage to all low descriptors": ("scribble(range(65))", RIGHT),
    "garbage to all descriptors": ("scribble()", "its worker's pipe had a wrong message"),
    "an answer forged": (
        'scribble(what=b\'{"parts": {"reward": 9}, "note": "", "seconds": 0.1}\')',
        "its worker's pipe had a wrong message",
    ),
    "all descriptors closed": ("os.closerange(0, 4096)", "closed or took over the pipes"),
    "all descriptors taken over": ("for fd in fds(): os.dup2(null, fd)", "closed or took over the pipes"),
    "streams closed": ("sys.stdout.close(); sys.stderr.close()", RIGHT),
    "streams replaced": ("sys.stdout = sys.stderr = None", RIGHT),
    "what a worker needs replaced": (
        "os.write = os.read = os.getpid = os._exit = os.fstat = json.dumps = json.loads = struct.pack = struct.Struct "
        "= time.perf_counter = signal.alarm = sys.setrecursionlimit = traceback.extract_tb = json.JSONEncoder.encode "
        "= None",
        RIGHT,
    ),
    "built-ins replaced": (
        "for name in ('len', 'isinstance', 'dict', 'zip', 'str', 'type', 'range', 'memoryview', 'list', 'getattr', "
        "'any', 'all', 'tuple'):\n    setattr(builtins, name, None)\nbuiltins.float = lambda value: 9.0",
        RIGHT,
    ),
    "modules forgotten": ("sys.modules.clear()", RIGHT),
    "sys.exit": ("sys.exit(0)", "SystemExit: 0"),
    "SystemExit caught": ("try: sys.exit(3)\nexcept SystemExit: pass", RIGHT),
    "os._exit with a clean code": ("really_exit(0)", "ended its worker process with exit code 0"),
    "another program in its place": ("os.execv('/bin/sleep', ['sleep', '60'])", "closed or took over the pipes"),
    "its process group killed": ("os.kill(0, signal.SIGKILL)", "ended by SIGKILL"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "no answer within 2 s"),
    "an alarm left behind": ("signal.setitimer(signal.ITIMER_REAL, 0.02)", RIGHT),
    "an alarm with a handler": (
        "signal.signal(signal.SIGALRM, later); signal.setitimer(signal.ITIMER_REAL, 0.02)",
        RIGHT,
    ),
    "an exit left behind": ("threading.Timer(0.02, really_exit, [5]).start()", RIGHT),
    "something to do at exit": ("atexit.register(time.sleep, 60)", RIGHT),
    "a terabyte": ("return float(len(bytes(10 ** 12)))", "MemoryError"),
    "endless recursion": ("return fall(0)", "RecursionError"),
    "no room for recursion": ("sys.setrecursionlimit(30)", RIGHT),
    "twenty megabytes printed": ("for _ in range(20): print('x' * 10 ** 6)", RIGHT),
    "printing without an end": ("while True: print('x' * 10 ** 6)", "no answer within 2 s"),
    "a hundred thousand parts": ("return {str(i): 1.0 for i in range(100_000)}", "it returned 100,000 parts"),
    "a part with a long name": ("return {'n' * 999: 1.0}", "names of at most 200 characters"),
    "a long note": ("return {'reward': 0.25, 'note': 'n' * 10 ** 7}", RIGHT),
    "a long error": ("raise ValueError('v' * 10 ** 7)", "ValueError: vvv"),
    "a number that exits": ("return Number()", "SystemExit: 4"),
    "a result whose parts raise": ("return Raising(0.25)", "ZeroDivisionError"),
    "a result whose detail exits": ("return RewardResult(0.25, detail=Items())", "SystemExit: 6"),
    "a note that is none": ("return RewardResult(0.25, note=7)", "the note of the reward is a int, not a text"),
    "a detail that holds itself": (
        "detail = []; detail.append(detail)\nreturn RewardResult(0.25, detail=detail)",
        "contains itself, or is",
    ),
    "a detail without an end": ("return RewardResult(0.25, detail=deep(10 ** 5))", "bytes of JSON; the cap is"),
    "a detail deeper than files may be": ("return RewardResult(0.25, detail=deep(300))", "not a JSON value"),
    "an enormous detail": (
        "return RewardResult(0.25, detail='d' * 10 ** 7)",
        "10,000,002 bytes of JSON; the cap is 65,536",
    ),
    "a detail that is no JSON": ("return RewardResult(0.25, detail={1, 2})", "it holds a set"),
    "a detail of half a pair": ("return RewardResult(0.25, detail={'\\ud800': '\\udfff'})", RIGHT),
    "an artifact that is none": ("return RewardResult(0.25, artifacts={'a': b'png'})", "is a bytes, not a PIL image"),
    "artifacts without names": ("return RewardResult(0.25, artifacts=[Image.new('L', (2, 2))])", "are a list"),
    "a name of two lines": ("return RewardResult(0.25, artifacts={'a\\nb': None})", "cannot be shown in a line"),
    "nine artifacts": (
        "return RewardResult(0.25, artifacts={str(i): Image.new('L', (2, 2)) for i in range(9)})",
        "returned 9 artifacts; the cap is 8",
    ),
    "an artifact too large": (
        "return RewardResult(0.25, artifacts={'a': Image.new('1', (9000, 9000))})",
        "9,000 x 9,000 pixels; the cap is",
    ),
    "artifacts of many bytes": (
        "noise = Image.frombytes('RGB', (1200, 1200), os.urandom(1200 * 1200 * 3))\n"
        "return RewardResult(0.25, artifacts={'a': noise, 'b': noise})",
        "bytes of PNG; the cap is 8,388,608",
    ),
    "an image that saves what it likes": (
        "return RewardResult(0.25, artifacts={'a': Liar(b'garbage')})",
        "not a readable PNG image",
    ),
    "an image that saves a bomb": (
        "return RewardResult(0.25, artifacts={'a': Liar(bomb(60000))})",
        "not a readable PNG image",
    ),
    "an image that saves a smaller bomb": (
        "return RewardResult(0.25, artifacts={'a': Liar(bomb(9000))})",
        "9,000 x 9,000 pixels; the cap is",
    ),
    "an image cut off": ("return RewardResult(0.25, artifacts={'a': Liar(bomb(9)[:20])})", "not a readable PNG image"),
    "an image that saves a gigabyte": (
        "return RewardResult(0.25, artifacts={'a': Liar(bytes(10 ** 9))})",
        # On a loaded machine writing a gigabyte takes longer than the limit of time.
        ("bytes of PNG; the cap is 8,388,608", "no answer within"),
    ),
}
FILE = """
import atexit, builtins, json, multiprocessing, os, signal, struct, subprocess, sys, threading, time, traceback, zlib
from PIL import Image
from vlmrl import RewardResult
really_exit, write, null = os._exit, os.write, os.open(os.devnull, os.O_RDWR)

class Number:
    def __float__(self): sys.exit(4)

class Raising(RewardResult):
    def __getattribute__(self, name): return 1 / 0

class Items(dict):
    def __init__(self): super().__init__(a=1)
    def items(self): sys.exit(6)

def deep(levels):
    value = []
    for _ in range(levels): value = [value]
    return value

def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

def bomb(side):
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    return b"\\x89PNG\\r\\n\\x1a\\n" + head + chunk(b"IDAT", zlib.compress(bytes(10 ** 6))) + chunk(b"IEND", b"")

class Liar(Image.Image):
    def __init__(self, content):
        super().__init__()
        self.content = content
        self._size, self._mode = (2, 2), "RGB"
    def copy(self): return self
    def save(self, sink, *args, **kwargs): sink.write(self.content)

def fds():
    return [int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) not in (null,)]

def scribble(where=None, what=b"garbage" * 9):
    for fd in where or fds():
        try: write(fd, what)
        except OSError: pass

def later(*_): raise TimeoutError("later")

def fall(n): return fall(n + 1)

def reward(x):
    if x.response == "honest":
        time.sleep(0.005)
        return float_(x.truth["answer"])
    return attacks[x.response](x) or 0.25

float_ = float
attacks = {}
"""


def reward_file() -> str:
    parts = [FILE]
    for number, (name, (body, _)) in enumerate(ATTACKS.items()):
        parts.append(f"def attack_{number}(x):\n{textwrap.indent(body, '    ')}\nattacks[{name!r}] = attack_{number}\n")
    return "".join(parts)


@pytest.mark.slow
def test_every_attack_costs_its_own_row_at_most(scorer):
    rows = []
    for number, name in enumerate(ATTACKS):
        rows.append(RewardInput(name))
        rows += [RewardInput("honest", truth={"answer": number + k / 8}) for k in range(3)]
    opened, others = time.monotonic(), set(below(os.getpid()))
    with scorer(reward_file(), options={"timeout_seconds": 2.0}) as s:
        scores = s.score(rows)
        left = [pid for pid in below(os.getpid()) if pid not in others]
    for x, score in zip(rows, scores, strict=True):
        if x.response == "honest":
            assert (score.value, score.error) == (x.truth["answer"], None), "a row beside the attacks"
            continue
        _, expected = ATTACKS[x.response]
        if isinstance(expected, float):
            assert (score.value, score.error) == (expected, None), x.response
        elif expected is not None:
            words = (expected,) if isinstance(expected, str) else expected
            assert any(told in (score.error or "") for told in words), (x.response, score)
        else:  # a race: right, or refused
            assert score.value == RIGHT or "had a wrong message" in (score.error or ""), (x.response, score)
    assert time.monotonic() - opened < 300, "bounded: two seconds for each row that hangs"
    assert_all_gone(left, 5)


def test_nothing_that_a_reward_started_outlives_its_scorer(scorer, tmp_path):
    source = f"""
    import os, subprocess, sys, time
    def reward(x):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                with open({str(tmp_path)!r} + "/begun", "w") as file: file.write(str(os.getpid()))
                os.rename({str(tmp_path)!r} + "/begun", {str(tmp_path)!r} + "/daemon")  # whole, once it is there
                os.closerange(0, 4096)
                time.sleep(60)
            os._exit(0)
        child = subprocess.Popen(["sleep", "60"], start_new_session=True)
        open({str(tmp_path)!r} + "/child", "w").write(str(child.pid))
        while not os.path.exists({str(tmp_path)!r} + "/daemon"): time.sleep(0.01)
        return 1.0
    """
    with scorer(source) as s:
        assert s.score([RewardInput("a")])[0].value == 1.0
        started = [int((tmp_path / name).read_text()) for name in ("daemon", "child")]
        assert all(map(lives, started)), "what lives between calls may be of use to the reward"
    assert not any(map(lives, started)), "gone when `close` has returned"


def test_a_reward_that_kills_its_keeper_leaves_no_process(scorer, tmp_path):
    source = f"""
    import os, signal, subprocess, time
    def daemon(name, *program):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 4096)
                with open({str(tmp_path)!r} + "/begun" + name, "w") as file: file.write(str(os.getpid()))
                os.rename({str(tmp_path)!r} + "/begun" + name, {str(tmp_path)!r} + "/" + name)
                if program: os.execve(program[0], program, {{}})
                time.sleep(60)
            os._exit(0)
        while not os.path.exists({str(tmp_path)!r} + "/" + name): time.sleep(0.01)
    def reward(x):
        daemon("plain")
        daemon("bare", "/bin/sleep", "60")  # without an environment
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    """
    with scorer(source) as s:
        (score,) = s.score([RewardInput("a")])
        assert "worker" in (score.error or ""), score
        started = [int((tmp_path / name).read_text()) for name in ("plain", "bare")]
        assert not any(map(lives, started)), "gone when the row has its outcome"


@pytest.mark.skipif(not CAN_MOUNT, reason="this user may not mount")
def test_files_in_shared_memory_end_with_the_worker(scorer):
    before, own = set(os.listdir("/dev/shm")), f"vlmrl-test-{os.getpid()}"
    source = f"""
    import os, signal
    from multiprocessing import shared_memory
    def reward(x):
        if x.response == "read": return float(open("/dev/shm/{own}").read())
        open("/dev/shm/{own}-left", "w").write("left")
        block = shared_memory.SharedMemory(create=True, size=1 << 20)
        block.buf[0] = 7
        again = shared_memory.SharedMemory(name=block.name)
        assert again.buf[0] == 7
        if x.response == "killed": os.kill(os.getppid(), signal.SIGKILL)
        return float(os.path.exists("/dev/shm/{own}-left"))
    """
    with open(f"/dev/shm/{own}", "w") as file:
        file.write("0.5")
    try:
        with scorer(source) as s:
            values = [s.score([RewardInput(text)])[0].value for text in ("read", "write", "killed")]
        assert values[:2] == [0.5, 1.0] and set(os.listdir("/dev/shm")) - before == {own}
    finally:
        os.unlink(f"/dev/shm/{own}")


@pytest.mark.slow
def test_nothing_that_a_reward_started_outlives_a_trainer_that_is_killed(tmp_path):
    (tmp_path / "r.py").write_text(
        "import os, subprocess, time\n"
        "def reward(x):\n"
        "    child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(f'{{child.pid}} {{os.getpid()}}')\n"
        "    time.sleep(60)\n"
    )
    code = (
        "from vlmrl.tasks.builtin_rewards import load_reward; from vlmrl.rewards.scoring import Scorer\n"
        "from vlmrl.types import RewardInput\n"
        f"Scorer(load_reward({str(tmp_path / 'r.py')!r} + ':reward')).score([RewardInput('a')])"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code])
    from processes import awaited

    pids = [int(pid) for pid in awaited(tmp_path / "pid", trainer).split()]
    trainer.kill()
    trainer.wait()
    assert_all_gone(pids, 10)


BATCH = """
import os, signal, time
def scribble():
    for fd in os.listdir("/proc/self/fd"):
        try: os.write(int(fd), b"garbage")
        except OSError: pass
def reward(completions, **columns):
    if "attack" in completions: {body}
    return [float(c == "right") for c in completions]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("os.fork()", None),
        ("scribble()", "wrong message"),
        ("os._exit(0)", "exit code 0"),
    ],
)
def test_an_attack_in_a_batch_costs_its_own_row_at_most(scorer, body, told):
    rows = [RewardInput(text) for text in ("right", "wrong", "attack", "right")]
    with scorer(BATCH.format(body=body)) as s:
        scores = s.score(rows)
    assert [score.value for score in (scores[0], scores[1], scores[3])] == [1.0, 0.0, 1.0]
    assert scores[2].value == 0.0 if told is None else told in (scores[2].error or "")


def test_an_error_of_an_attack_names_the_reward_and_the_row(scorer):
    source = """
    import os
    def reward(x):
        for fd in range(3, 400):
            try: os.write(fd, b"!")
            except OSError: pass
    """
    with scorer(source) as s, pytest.raises(RewardError, match="had a wrong message") as error:
        s.score([RewardInput("a")], strict=True, rows=["geo row 7 sample 2"])
    assert error.value.where == "geo row 7 sample 2" and "mine.py:reward" in error.value.message


@pytest.mark.slow
@pytest.mark.parametrize("body", ["os.fork()", "json.dumps = json.loads = None", "signal.alarm(1)", "os.nice(1)"])
def test_the_same_while_the_file_is_imported(scorer, body):
    with scorer(f"import json, os, signal\n{body}\ndef reward(x): return 0.5\n") as s:
        assert [score.value for score in s.score([RewardInput("a")] * 3)] == [0.5] * 3


def test_a_row_that_another_one_cost_its_worker_is_asked_again_and_says_so(scorer):
    source = """
    import os, threading, time
    def reward(x):
        if x.response == "first": threading.Timer(0.05, os._exit, [5]).start()
        time.sleep(0.2 if x.response == "second" else 0)
        return 1.0
    """
    with scorer(source) as s:
        first, second, third = s.score([RewardInput(text) for text in ("first", "second", "third")])
    assert (first.value, second.value, third.value) == (1.0, 1.0, 1.0)
    assert (first.note, third.note) == ("", "")
    assert second.note == "asked again: it ended its worker process with exit code 5"


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["0", "0, 1, 2"])
def test_closed_standard_descriptors_of_the_trainer_are_no_pipes(tmp_path, closed):
    """A pipe that is descriptor 0 would be replaced by the worker's standard input."""
    (tmp_path / "r.py").write_text("def reward(x): return float(x.response)\n")
    code = textwrap.dedent(f"""
        import os
        answer = os.dup(1)
        for fd in ({closed},): os.close(fd)
        from vlmrl.tasks.builtin_rewards import load_reward
        from vlmrl.rewards.scoring import Scorer
        from vlmrl.types import RewardInput
        with Scorer(load_reward("r.py:reward"), workers=2) as scorer:
            scores = scorer.score([RewardInput(str(n)) for n in range(5)], strict=True)
        os.write(answer, repr([score.value for score in scores]).encode())
    """)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, timeout=120)
    assert done.stdout == b"[0.0, 1.0, 2.0, 3.0, 4.0]"


@pytest.mark.slow
def test_few_open_files_are_enough(tmp_path):
    """Where descriptors may not be high, any will do."""
    (tmp_path / "r.py").write_text("def reward(x): return float(x.response)\n")
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "from vlmrl.tasks.builtin_rewards import load_reward; from vlmrl.rewards.scoring import Scorer\n"
        "from vlmrl.types import RewardInput\n"
        "with Scorer(load_reward('r.py:reward')) as scorer: print(scorer.score([RewardInput('3')])[0].value)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == "3.0\n", done.stderr


def test_processes_far_below_the_worker_leave_the_machine_to_others(scorer):
    source = """
    import os
    def reward(x):
        for depth in range(5):
            read, write = os.pipe()
            if os.fork():
                os.wait()
                data = os.read(read, 100)
                if depth: os.write(out, data); os._exit(0)
                return {f"level {i}": float(word) for i, word in enumerate(data.split())}
            out = write
            policies = (policies if depth else "") + f"{os.sched_getscheduler(0)} "
        os.write(out, policies.encode()); os._exit(0)
    """
    with scorer(source) as s:
        (score,) = s.score([RewardInput("a")], strict=True)
    assert [*score.parts.values()] == [os.SCHED_OTHER] * 2 + [os.SCHED_IDLE] * 3


def test_a_worker_is_measured_and_not_its_keeper(scorer):
    with scorer("import os\ndef reward(x): return float(os.getpid())") as s:
        (score,) = s.score([RewardInput("a")])
        assert s.pids() == [score.value]
        assert psutil.Process(s.pids()[0]).ppid() in below(os.getpid())
