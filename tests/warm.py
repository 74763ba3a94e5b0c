"""Python processes that begin in a moment: forks of one that has imported torch and transformers, four seconds' work.

For tests of what a process does, not of how it is imported. Such a process has its own argv, folder, environment,
session and streams, and the test is its parent. All have one hash seed: what must not depend on it is tested with
`subprocess.Popen`. So is what an environment changes at an import.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib.util
import inspect
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

NEST = "VLMRL_TEST_NEST"
"""Variable of a launcher whose ranks begin in a moment, too. `all`: so does every Python process below it."""
AT_IMPORT = ("HF_", "TRANSFORMERS_", "OMP_", "LD_", "MALLOC_", "PYTORCH_", "VLLM_", "PYTHONHASHSEED", "PYTHONWARNINGS")
"""Beginnings of variables that a library reads while it is imported."""
PR_SET_PDEATHSIG, PR_GET_TID_ADDRESS = 1, 40
SYS_CLONE = 56
CLONE_FLAGS = 0x8000 | 0x200000 | 0x1000000  # CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID
CAN_FORK = sys.platform == "linux" and os.uname().machine == "x86_64"
"""True if there are forks at all."""
LONGEST_JOB, MOST_KEPT = 1 << 20, 8
"""Of a job: bytes of its text, and file descriptors that a process keeps beside its streams."""
LOADED = (
    *("torch.distributed.checkpoint", "torch.distributed.launcher.api"),
    "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
    *("detect_secrets", "pandas", "peft", "pyarrow.compute", "pyarrow.parquet"),  # pyarrow's first table loads pandas
    *("vlmrl.checkpoint.merge", "vlmrl.cli.app", "vlmrl.diagnose.signs", "vlmrl.evaluate.eval"),
    *("vlmrl.evaluate.generate", "vlmrl.launch.start", "vlmrl.setup.model", "vlmrl.setup.run_records"),
    *("vlmrl.tasks.builtin_rewards", "vlmrl.train.journal", "vlmrl.train.resume", "vlmrl.train.rl", "vlmrl.train.sft"),
    "vlmrl.train.start",
)
"""Modules that commands load when they begin: not again in each fork."""
VLLM_LOADED = (
    *("vllm.entrypoints.llm", "vllm.model_executor.models.qwen2_5_vl", "vllm.v1.attention.backends.cpu_attn"),
    *("vllm.v1.core.sched.scheduler", "vllm.v1.worker.cpu_worker", "vlmrl.rollout.vllm.host"),
    "vlmrl.rollout.vllm.worker",
)


def _read_at_import(env: Any) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(AT_IMPORT)}


class Popen(subprocess.Popen):
    """As `subprocess.Popen`. A Python process is forked, if none of its arguments forbids it."""

    def _execute_child(self, *arguments: Any) -> None:
        plain = super()._execute_child
        call = inspect.signature(plain).bind(*arguments).arguments
        words = [os.fspath(word) for word in call["args"]] if isinstance(call["args"], (list, tuple)) else []
        env = {**(os.environ if call["env"] is None else call["env"])}
        if (
            not CAN_FORK
            or (_nested and False in _channels and _channels[False][0] != os.getpid())
            or len(words) < 2
            or words[0] != sys.executable
            or (words[1].startswith("-") and words[1] not in ("-c", "-m"))
            or call["preexec_fn"]
            or call["pass_fds"]
            or (_read_at_import(env) != _read_at_import(os.environ) and not _pretends_anew(env))
        ):
            return plain(*arguments)
        streams = [call["p2cread"], call["c2pwrite"], call["errwrite"]]
        job = {
            "words": words[1:],
            "env": env,
            "cwd": os.fspath(call["cwd"] or os.getcwd()),
            "session": bool(call["start_new_session"]),
        }
        own = [number if given == -1 else given for number, given in enumerate(streams)]
        self.pid = _ask(_server(env), job, own)
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[name] for name in names))  # type: ignore[attr-defined]


def _ask(channel: socket.socket, job: dict[str, Any], fds: list[int]) -> int:
    """The process id of the fork that does the job, with these file descriptors: streams, and what it keeps."""
    socket.send_fds(channel, [json.dumps(job).encode()], fds)
    answer = channel.recv(64)
    assert answer, "the process that forks has ended: see what it printed"
    return int(answer)


def _spawn(path: bytes, words: list[str], keeps: list[int]) -> int:
    """As `multiprocessing.util.spawnv_passfds`: what "spawn" starts is a fork of this process's server."""
    if words[1] != "-c" or words[-1] != "--multiprocessing-fork" or _channels[False][0] != os.getpid():
        return _spawn_new(path, words, keeps)
    job = {"words": words[1:], "env": {**os.environ}, "cwd": os.getcwd(), "session": False, "keeps": keeps}
    return _ask(_channels[False][1], job, [0, 1, 2, *keeps])


_spawn_new = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]
_channels: dict[bool, tuple[int, socket.socket]] = {}
"""Whether the processes have a pretended GPU -> (process that asks, its channel to the server)."""
_nested = False
"""Whether this process, or the one it is a fork of, has a server that is a fork of itself."""
_lock = threading.Lock()


def _pretends_anew(env: Mapping[str, str]) -> bool:
    """Return whether a process is to have a pretended GPU (tests/pretend_gpu) that this one has not."""
    return "PRETEND_GPUS" in env and "PRETEND_GPUS" not in os.environ


def _server(env: Mapping[str, str]) -> socket.socket:
    """The channel to this process's server for such an environment, which is started when it is first used."""
    anew = _pretends_anew(env)
    with _lock:
        if anew not in _channels or _channels[anew][0] != os.getpid():
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = [sys.executable, __file__, str(theirs.fileno())]
            own = {**(env if anew else os.environ)}
            subprocess.Popen(command, pass_fds=[theirs.fileno()], env=own, stdin=subprocess.DEVNULL)
            theirs.close()
            _channels[anew] = os.getpid(), ours
        return _channels[anew][1]


def run(words: list[str], **more: Any) -> subprocess.CompletedProcess:
    """As `subprocess.run`, without `input`."""
    timeout, check = more.pop("timeout", 600), more.pop("check", False)
    if more.pop("capture_output", False):
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(words, **more) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(words, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def all_in_forks(patch: Any) -> None:
    """Let every Python process below this one begin as a fork, those of `multiprocessing` in a fork, too."""
    patch.setattr(subprocess, "Popen", Popen)
    patch.setenv(NEST, "all")


def prove_in_forks() -> None:
    """Let the process that proves a merge begin as a fork, too."""
    from vlmrl.checkpoint import proof

    proof.subprocess = sys.modules["warm"]  # type: ignore[attr-defined]


def _warm_up() -> None:
    """Import modules and compute nothing: threads would not survive the fork."""
    os.fsync = os.fstat  # as in conftest.py
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # of pyarrow
    if importlib.util.find_spec("vllm") is not None:
        import setproctitle

        from vlmrl.rollout.vllm.engine import SETTINGS

        setproctitle.getproctitle()  # it finds the place of the title before the environment has moved
        os.environ |= SETTINGS
        for name in VLLM_LOADED:
            importlib.import_module(name)
    for name in LOADED:
        importlib.import_module(name)
    from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen2_5_VLForConditionalGeneration  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "an import has started threads"
    gc.collect()
    gc.freeze()


def _next_job(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each job. Returns it in the fork, and None in the server when nobody can ask it any more."""
    while True:
        text, streams, _, _ = socket.recv_fds(channel, LONGEST_JOB, 3 + MOST_KEPT)
        if not text:
            return None
        pid = _fork_sibling()
        if not pid:
            channel.close()
            return json.loads(text), streams
        channel.send(str(pid).encode())
        for fd in streams:
            os.close(fd)


def _fork_sibling() -> int:
    """As `os.fork`, but the parent of the fork is the parent of this process, which can wait for it."""
    python, kernel, address = ctypes.pythonapi, ctypes.PyDLL(None), ctypes.c_void_p()
    kernel.prctl(PR_GET_TID_ADDRESS, ctypes.byref(address))  # where the C library keeps its own copy of the id
    assert address.value
    python.PyOS_BeforeFork()
    pid = kernel.syscall(SYS_CLONE, CLONE_FLAGS | signal.SIGCHLD, None, None, address, None)
    (python.PyOS_AfterFork_Parent if pid else python.PyOS_AfterFork_Child)()
    assert pid >= 0
    return pid


def _become(job: dict[str, Any], streams: list[int]) -> None:
    """Make this fork what a new interpreter would be."""
    if job["session"]:
        os.setsid()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 500) for fd in streams]
    for fd in streams:
        os.close(fd)
    for number, fd in zip((0, 1, 2, *job.get("keeps", ())), high, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    tempfile.tempdir = None  # an import has read TMPDIR
    _name([sys.executable, *job["words"]])
    lines = 1 if os.isatty(1) or "PYTHONUNBUFFERED" in os.environ else -1
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False, buffering=lines)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def _name(words: list[str]) -> None:
    """Let this process be listed with these words; only where vLLM's environment has the package for it."""
    if "setproctitle" in sys.modules:
        sys.modules["setproctitle"].setproctitle(" ".join(words))


def nest(*, all_processes: bool) -> None:
    """Give this process a server of its own, a fork of itself, for a launcher's ranks or all its Python processes."""
    global _nested
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        _channels[False] = os.getpid(), ours
        _nested = True
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = Popen  # type: ignore[misc]
        if all_processes:
            subprocess.Popen = Popen  # type: ignore[misc]
            multiprocessing.util.spawnv_passfds = _spawn  # type: ignore[attr-defined]
        return
    ours.close()
    os.setsid()  # what a terminal sends reaches those whom it is for
    _name([__file__])
    _serve(theirs)


def _serve(channel: socket.socket) -> None:
    """Answer until nobody can ask any more; a fork goes on here, as the process that it is to be."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    work = _next_job(channel)
    if work is None:
        os._exit(0)
    job, streams = work
    nests = job["env"].get(NEST)
    if nests != "all":
        job["env"].pop(NEST, None)
    _become(job, streams)
    if nests:
        nest(all_processes=nests == "all")
    _end(_code_of(job["words"]))


def _code_of(words: list[str]) -> int:
    """Run what a new interpreter would run. Returns its exit code."""
    try:
        _run(words)
    except SystemExit as leave:
        if leave.code is None or isinstance(leave.code, int):
            return leave.code or 0
        print(leave.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """Leave as an interpreter does, without taking apart what the fork shares."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _run(words: list[str]) -> None:
    ahead = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    first, rest = words[0], words[1:]
    place = {"-c": "", "-m": os.getcwd()}.get(first, str(Path(first).resolve().parent))
    sys.path[:] = [place, *ahead, *BASE]
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        module = type(sys)("__main__")
        sys.modules["__main__"] = module
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    elif first == "-m":
        sys.argv = [first, *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(first, run_name="__main__")


BASE: list[str] = []

if __name__ == "__main__":
    del sys.path[0]
    BASE[:] = [entry for entry in sys.path if entry not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.modules["warm"] = sys.modules["__main__"]
    _warm_up()
    _serve(socket.socket(fileno=int(sys.argv[1])))
