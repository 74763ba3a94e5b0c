"""System calls of sandboxed code, as a seccomp filter: what is not listed here is refused.

There is no call for a socket, a process, a namespace, another process's memory, io_uring or BPF. Memory files
(memfd_create) are not there, since no limit counts them. The numbers are those of the kernel's headers
(asm/unistd_64.h, asm-generic/unistd.h), which a test compares with the table.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping

ALLOWED = """
    read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70
    preadv2:327:286 pwritev2:328:287 close:3:57 close_range:436:436 lseek:8:62 open:2: openat:257:56 stat:4:
    lstat:6: fstat:5:80 newfstatat:262:79 statx:332:291
    access:21: faccessat:269:48 faccessat2:439:439 readlink:89: readlinkat:267:78 getcwd:79:17 chdir:80:49
    fchdir:81:50 getdents:78: getdents64:217:61 statfs:137:43 fstatfs:138:44
    mkdir:83: mkdirat:258:34 rmdir:84: unlink:87: unlinkat:263:35 rename:82: renameat:264:38 renameat2:316:276
    creat:85: ftruncate:77:46 fallocate:285:47 fsync:74:82 fdatasync:75:83
    umask:95:166 dup:32:23 dup2:33: dup3:292:24 flock:73:32 pipe:22: pipe2:293:59 sendfile:40:71
    copy_file_range:326:285 fadvise64:221:223
    mmap:9:222 munmap:11:215 mprotect:10:226 mremap:25:216 msync:26:227 madvise:28:233 mincore:27:232 brk:12:214
    membarrier:324:283 get_mempolicy:239:236
    poll:7: ppoll:271:73 select:23: pselect6:270:72 epoll_create:213: epoll_create1:291:20 epoll_ctl:233:21
    epoll_wait:232: epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284: eventfd2:290:19
    timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87
    futex:202:98 futex_waitv:449:449 set_robust_list:273:99 get_robust_list:274:100 rseq:334:293
    set_tid_address:218:96 arch_prctl:158:
    rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigsuspend:130:133
    rt_sigtimedwait:128:137 sigaltstack:131:132 restart_syscall:219:128 pause:34:
    alarm:37: getitimer:36:102 setitimer:38:103
    nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169
    time:201: times:100:153
    getpid:39:172 getppid:110:173 gettid:186:178 getpgrp:111: getpgid:121:155 getsid:124:156 getuid:102:174
    geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148 getresgid:120:150 getgroups:115:158
    getrlimit:97:163 getrusage:98:165 sysinfo:99:179 uname:63:160 getcpu:309:168 getrandom:318:278
    sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120
    sched_get_priority_max:146:125 sched_get_priority_min:147:126 getpriority:140:141
    exit:60:93 exit_group:231:94
"""
"""Calls that do what they do elsewhere, as `name:number on x86-64:number on aarch64`; no number = it is not there."""
PRETENDED = "chmod:90: fchmod:91:52 fchmodat:268:53 utime:132: utimes:235: futimesat:261: utimensat:280:88"
"""Calls that do nothing and succeed: no layer limits which files they reach, and copying a file needs them."""
CHECKED: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "fcntl:72:25": (1, (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)),  # not F_SETOWN, F_SETSIG: they send signals
    "ioctl:16:29": (1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # not TIOCSTI: it types into a terminal
    "prctl:157:167": (0, (3, 15, 16, 23, 0x53564D41)),  # names of threads and of memory, and questions
    "prlimit64:302:261": (0, (0,)),  # of this process
}
"""Call -> (index of an argument, values that it may have)."""
ITSELF = ("kill:62:129", "tgkill:234:131", "tkill:200:130")
"""Calls that send a signal. The first argument must be this process; of `tkill`, its first thread."""
CLONE, CLONE3 = "clone:56:220", "clone3:435:435"
CLONE_THREAD, NEW_NAMESPACES = 0x00010000, 0x7E020000
NEWEST = 470
"""Calls from this number on are younger than the table: they answer ENOSYS, so that programs take an older one."""

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Name of `os.uname().machine` -> (column of the table, the kernel's AUDIT_ARCH number)."""
X32_BIT = 0x40000000
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`. Of an argument (8 bytes, little-endian) the lower 4 bytes are checked: the kernel
reads these calls' arguments as 32 bits, but for the flags of `clone`, whose upper bits it ignores."""


def numbers(table: str, machine: str) -> dict[str, int]:
    """Return name -> number of the calls of a table that a machine has."""
    column = 1 + ARCHITECTURES[machine][0]
    entries = (entry.split(":") for entry in table.split())
    return {entry[0]: int(entry[column]) for entry in entries if entry[column]}


def filter_program(machine: str, pid: int) -> bytes:
    """Return the filter as instructions of classic BPF (`struct sock_filter`), 8 bytes each.

    Args:
        machine: key of ARCHITECTURES.
        pid: process id of the process that will be filtered, as it sees itself.
    """
    program: list[bytes] = []

    def add(code: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        program.append(struct.pack("<HBBI", code, if_true, if_false, value & 0xFFFFFFFF))

    def answer(table: str, action: int) -> None:
        for number in numbers(table, machine).values():
            add(_EQUAL, number, 0, 1)
            add(_RETURN, action)

    def check(call: str, argument: int, values: tuple[int, ...]) -> None:
        """Allow a call if an argument has one of these values."""
        for number in numbers(call, machine).values():
            add(_EQUAL, number, 0, len(values) + 3)
            add(_LOAD, _ARGUMENTS + 8 * argument)
            for left, value in zip(range(len(values), 0, -1), values, strict=True):
                add(_EQUAL, value, left, 0)  # to the last instruction of this block
            add(_RETURN, ERRNO | errno.EPERM)
            add(_RETURN, ALLOW)

    add(_LOAD, _ARCHITECTURE)
    add(_EQUAL, ARCHITECTURES[machine][1], 1, 0)
    add(_RETURN, KILL)
    add(_LOAD, _NUMBER)
    add(_AT_LEAST, X32_BIT, 0, 1)
    add(_RETURN, KILL)
    answer(ALLOWED, ALLOW)
    add(_AT_LEAST, NEWEST, 0, 1)
    add(_RETURN, ERRNO | errno.ENOSYS)
    answer(PRETENDED, ERRNO | 0)
    answer(CLONE3, ERRNO | errno.ENOSYS)  # its flags lie in memory, where no filter sees them; libraries take `clone`
    for call, (argument, values) in CHECKED.items():
        check(call, argument, values)
    for call in ITSELF:
        check(call, 0, (pid,))
    for number in numbers(CLONE, machine).values():
        add(_EQUAL, number, 0, 4)
        add(_LOAD, _ARGUMENTS)
        add(_HAS_BIT, NEW_NAMESPACES, 2, 0)
        add(_HAS_BIT, CLONE_THREAD, 0, 1)
        add(_RETURN, ALLOW)
    add(_RETURN, ERRNO | errno.EPERM)
    return b"".join(program)
