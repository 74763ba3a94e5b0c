"""The filter of system calls, interpreted instruction by instruction, and its numbers beside the kernel's headers."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from vlmrl.sandbox.calls import (
    ALLOW,
    ALLOWED,
    ARCHITECTURES,
    CHECKED,
    CLONE,
    CLONE3,
    ERRNO,
    ITSELF,
    KILL,
    PRETENDED,
    filter_program,
    numbers,
)
from vlmrl.sandbox.confine import CAPSET, SECCOMP

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
MACHINES = list(ARCHITECTURES)
PID, REFUSED = 4711, ERRNO | errno.EPERM


def interpret(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """What the kernel answers to a call; see its Documentation/networking/filter.rst."""
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, arch, 0, *(list(arguments) + [0] * 6)[:6])
    at = accumulator = 0
    while True:
        code, if_true, if_false, k = struct.unpack_from("<HBBI", program, 8 * at)
        at += 1
        if code == 0x06:
            return k
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
            continue
        holds = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[code]
        at += if_true if holds else if_false


def answer(machine: str, number: int, *arguments: int) -> int:
    return interpret(filter_program(machine, PID), ARCHITECTURES[machine][1], number, *arguments)


def header(machine: str) -> dict[str, int]:
    path = HEADERS[machine]
    if not path.is_file():
        pytest.skip("the kernel's headers are not installed")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text())
    names = {name: int(number) for name, number in found}
    if machine == "aarch64":
        names["newfstatat"] = names.get("newfstatat", names.get("fstatat", 79))
    return names


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_are_those_of_the_kernel(machine: str) -> None:
    known, tables = header(machine), (ALLOWED, PRETENDED, CLONE, CLONE3, *CHECKED, *ITSELF)
    ours = {name: number for table in tables for name, number in numbers(table, machine).items()}
    assert {name: known.get(name) for name in ours} == ours
    assert known["seccomp"] == SECCOMP[machine] and known["capset"] == CAPSET[machine]
    # A call that exists on the machine is not left out of a row by mistake.
    for table in tables:
        for entry in table.split():
            name = entry.split(":")[0]
            assert (name in known) == (name in ours), name


@pytest.mark.parametrize("machine", MACHINES)
def test_every_call_of_the_kernel_is_answered_as_the_table_says(machine: str) -> None:
    allowed, pretended = (set(numbers(table, machine).values()) for table in (ALLOWED, PRETENDED))
    special = {n for table in (CLONE, CLONE3, *CHECKED, *ITSELF) for n in numbers(table, machine).values()}
    for number in range(600):
        if number in special:
            continue
        want = ALLOW if number in allowed else ERRNO if number in pretended else REFUSED if number < 470 else ERRNO | 38
        assert answer(machine, number) == want, number
    known = header(machine)
    refused = (
        "execve",
        "execveat",
        "ptrace",
        "socket",
        "connect",
        "mount",
        "unshare",
        "setns",
        "bpf",
        "io_uring_setup",
        "process_vm_readv",
        "memfd_create",
        "symlinkat",
        "linkat",
        "mknodat",
        "fchownat",
        "setxattr",
        "landlock_restrict_self",
        "userfaultfd",
        "keyctl",
        "perf_event_open",
        "pidfd_open",
        "openat2",
    )
    for name in refused:
        assert answer(machine, known[name]) == REFUSED, name


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_are_checked(machine: str) -> None:
    of = {t.split(":")[0]: n for t in (CLONE, CLONE3, *CHECKED, *ITSELF) for n in numbers(t, machine).values()}
    threads = 0x3D0F00  # what glibc's pthread_create passes
    assert answer(machine, of["clone"], threads) == ALLOW
    assert answer(machine, of["clone"], 17) == answer(machine, of["clone"], 0x4111) == REFUSED
    for namespace in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert answer(machine, of["clone"], threads | namespace) == REFUSED
    assert answer(machine, of["clone3"], 0) == ERRNO | errno.ENOSYS
    for name in ("kill", "tgkill", "tkill"):
        assert answer(machine, of[name], PID, 9) == ALLOW
        for other in (PID + 1, 1, 0, -1 & 0xFFFFFFFF, -PID & 0xFFFFFFFF):
            assert answer(machine, of[name], other, 9) == REFUSED
    assert answer(machine, of["fcntl"], 3, 1) == ALLOW and answer(machine, of["fcntl"], 3, 8) == REFUSED
    assert answer(machine, of["fcntl"], 3, 10) == answer(machine, of["fcntl"], 3, 1031) == REFUSED
    assert answer(machine, of["ioctl"], 0, 0x5401) == ALLOW and answer(machine, of["ioctl"], 0, 0x5412) == REFUSED
    assert answer(machine, of["prctl"], 15) == ALLOW and answer(machine, of["prctl"], 4, 1) == REFUSED
    assert answer(machine, of["prlimit64"], 0) == ALLOW and answer(machine, of["prlimit64"], PID) == REFUSED
    # The kernel reads 32 bits of these arguments: what stands above them does not hide a value.
    assert answer(machine, of["kill"], 1 << 32 | 1, 9) == REFUSED
    assert answer(machine, of["ioctl"], 0, 1 << 32 | 0x5412) == REFUSED


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_other_architectures_end_the_process(machine: str) -> None:
    program = filter_program(machine, PID)
    for arch in {0x40000003, 0x40000028, *(number for _, number in ARCHITECTURES.values())}:
        assert (interpret(program, arch, 20) == KILL) == (arch != ARCHITECTURES[machine][1])
    assert answer(machine, 0x40000000 | 39) == KILL
    assert len(program) // 8 < 4096, "the kernel takes no longer one"
