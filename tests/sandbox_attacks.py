"""Code that tries to leave the sandbox, and what must be untouched afterwards.

Each attack prints ESCAPED where it got what it wanted. `Place` has what it may want: a secret, servers, a victim; it
tells after the attack what was reached all the same.
"""

# ruff: noqa: E501 (an attack is one line of the table)
from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SECRET = "token-of-the-caller-4711"

PRELUDE = """
import ctypes, os, struct, sys, time, errno
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def escaped(what=""): print("ESCAPED", what)
def call(number, *args):
    args = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    result = libc.syscall(ctypes.c_long(number), *args)
    if result >= 0: escaped(("syscall", number, result))
    return result
"""


def tries(code: str) -> str:
    """Code whose every line gets what it wants if it raises nothing."""
    lines = enumerate(code.strip().splitlines())
    return "\n".join(f"try:\n    {line}\n    escaped('line {i}')\nexcept Exception: pass" for i, line in lines)


ATTACKS: dict[str, str] = {
    "read a file": tries("open({secret!r}).read()"),
    "read by descriptors": tries("os.read(os.open('/', os.O_RDONLY), 9)\nos.open('/etc/shadow', os.O_RDONLY)"),
    "read below O_PATH": tries(
        "open('/proc/self/fd/%d' % os.open({secret!r}, os.O_PATH)).read()\n"
        "os.open(os.path.basename({secret!r}), os.O_RDONLY, dir_fd=os.open(os.path.dirname({secret!r}), os.O_PATH))"
    ),
    "symbolic link": tries("os.symlink({secret!r}, 'l'); open('l').read()"),
    "hard link": tries("os.link({secret!r}, 'h'); open('h').read()"),
    "list home": tries("os.listdir({home!r}).index({at_home!r})\nos.listdir('/root').index('.bashrc')"),
    "other processes": tries(
        "open('/proc/1/environ').read().index({nekot!r}[::-1])\nopen('/proc/{victim}/environ').read(1)\n"
        "open('/proc/{caller}/maps').read(1)\nopen('/proc/{caller}/mem', 'rb').read(1)\n"
        "open(f'/proc/{{os.getppid()}}/mem', 'rb').read(1)\nopen(f'/proc/{{os.getppid()}}/maps').read(1)"
    ),
    "write outside": tries("open({outside!r} + '/new', 'w').write('x')\nopen({secret!r}, 'a').write('x')"),
    "write to temporary folders": "for d in ('/tmp', '/dev/shm'):\n    try: open(d + '/vlmrl-was-here', 'w')\n    except OSError: pass",
    "write to the packages": tries("import PIL; open(PIL.__path__[0] + '/new.py', 'w')\nopen(sys.executable, 'ab')"),
    "change what is outside": tries(
        "os.truncate({secret!r}, 0)\nos.rename({secret!r}, 'mine')\nos.unlink({secret!r})\nos.rmdir({outside!r})\n"
        "os.mkdir({outside!r} + '/d')\nos.setxattr({secret!r}, 'user.x', b'1')\nos.chown({secret!r}, os.getuid(), -1)"
    ),
    "rights and times outside": "os.chmod({secret!r}, 0o777); os.utime({secret!r}, (1, 1))",
    "special files": tries("os.mkfifo('f')\nos.mknod('n', 0o600 | 0o20000, os.makedev(1, 1))\nopen('/dev/mem', 'rb')"),
    "mounts": tries("os.chroot('.')") + "\ncall(165, b'none', b'/tmp', b'tmpfs', 0, None)\ncall(155, b'.', b'.')\ncall(428, -100, b'/', 1)",
    "openat2": "call(437, -100, {secret!r}.encode(), struct.pack('<QQQ', 0, 0, 0), 24)",
    "handles": "call(304, -100, b'xxxxxxxxxxxxxxxx', 0)\ncall(303, -100, {secret!r}.encode(), bytes(64), bytes(8), 0)",
    "TCP": tries("import socket; socket.create_connection(('127.0.0.1', {tcp}), 2)")
    + "\nfd = call(41, 2, 1, 0)\ncall(42, fd if fd >= 0 else 3, struct.pack('<H', 2) + struct.pack('>H', {tcp}) + bytes([127,0,0,1]) + bytes(8), 16)",
    "UDP": tries("import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp}))") + "\ncall(41, 2, 2, 0)",
    "a server": tries("import socket; socket.create_server(('127.0.0.1', 0))"),
    "Unix sockets": tries("import socket; socket.socket(1).connect({unix!r})\nimport socket; socket.socket(1).connect(chr(0) + {abstract!r})") + "\ncall(41, 1, 1, 0)",
    "netlink": "call(41, 16, 3, 0)\ncall(41, 17, 3, 0)",
    "socket pairs": "call(53, 1, 1, 0, bytes(8))",
    "io_uring": "call(425, 8, bytes(120))\ncall(426, 3, 1, 1, 0, None, 0)\ncall(427, 3, 0, None, 0)",
    "fork": tries("os.fork() or os._exit(0)\nos.forkpty()\nos.posix_spawn('/bin/true', ['true'], {{}})") + "\ncall(57)\ncall(58)",
    "programs": tries("import subprocess; subprocess.run(['true'])\nos.system('true') and 1/0\nos.popen('true').read()")
    + "\nlibc.system(b'touch {outside}/new')\ncall(59, b'/bin/true', None, None)\ncall(322, -100, b'/bin/true', None, None, 0)",
    "clone": "call(56, 17, None, None, None, None)\ncall(56, 0x10000000, None, None, None, None)\ncall(56, 0x100, None, None, None, None)\ncall(435, struct.pack('<QQQQQQQQ', 0, 0, 0, 0, 17, 0, 0, 0), 64)",
    "fork bomb": "\nfor _ in range(2000):\n    libc.fork()\n    libc.vfork() if False else None\nif len(os.listdir('.')) < 0: escaped()",
    "signals": tries(
        "os.kill({victim}, 9)\nos.kill({caller}, 0)\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)\nos.killpg({victim}, 9)\nos.kill(0, 0)"
    ) + "\ncall(234, {victim}, {victim}, 9)\ncall(200, {victim}, 9)\ncall(129, {victim}, 9, bytes(128))\ncall(297, {victim}, {victim}, 9, bytes(128))",
    "signals of files": tries("import fcntl; r, w = os.pipe(); fcntl.fcntl(r, 8, {victim})\nimport fcntl; fcntl.fcntl(1, 10, 9)"),
    "descriptors of processes": "call(434, {victim}, 0)\ncall(434, os.getppid(), 0)\ncall(424, 3, 9, None, 0)\ncall(438, 3, 0, 0)",
    "ptrace": "call(101, 16, {victim}, 0, 0)\ncall(101, 0, 0, 0, 0)\ncall(101, 16, os.getppid(), 0, 0)",
    "memory of others": "call(310, os.getppid(), bytes(16), 1, bytes(16), 1, 0)\ncall(311, {victim}, bytes(16), 1, bytes(16), 1, 0)",
    "privileges": tries("os.seteuid(0) if os.geteuid() else 1/0\nos.setgroups([0])\nos.setuid(12345)\nos.nice(-5)\nos.sched_setaffinity(os.getppid(), [0])")
    + "\ncall(126, struct.pack('<Ii', 0x20080522, 0), b'\\xff' * 24)\ncall(105, 0) if os.getuid() else None",
    "namespaces": "call(272, 0x10000000)\ncall(272, 0x20000)\ncall(308, 3, 0)",
    "kernel": "call(321, 0, bytes(72), 72)\ncall(298, bytes(112), 0, -1, -1, 0)\ncall(323, 0)\ncall(175, b'', 0, b'')\ncall(246, 0, 0, None, 0)\ncall(250, 0, 0, 0, 0, 0)\ncall(103, 3, bytes(99), 99)\ncall(135, 0x0040000)",
    "memory files": "call(319, b'x', 0)\ncall(447, 0)\ncall(29, 0, 4096, 0o1600)\ncall(68, 0, 0o1600)\ncall(64, 0, 1, 0o1600)\ncall(240, b'q', 0o102, 0o600, None)",
    "filter off": "call(157, 22, 0, 0, 0, 0)\ncall(157, 38, 0, 0, 0, 0)\ncall(157, 4, 1, 0, 0, 0)\ncall(157, 1, 0, 0, 0, 0)",
    "terminal": tries("import fcntl; fcntl.ioctl(0, 0x5412, b'x')\nimport fcntl; fcntl.ioctl(1, 0x5412, b'x')"),
    "other numbers": "call(0x40000000 + 39)",
    "calls of 32 bits": (
        "import mmap\npage = mmap.mmap(-1, 4096, prot=7)\npage.write(bytes([0x53, 0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0x5b, 0xc3]))\n"
        "address = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
        "if ctypes.CFUNCTYPE(ctypes.c_int)(address)() > 0: escaped('int 0x80')"
    ),
    "environment": "if any({nekot!r}[::-1] in f'{{k}}{{v}}' for k, v in os.environ.items()): escaped(os.environ)",
    "memory of the zygote": "import gc\nif any(isinstance(o, dict) and {nekot!r}[::-1] in map(str, list(o.values())[:50]) for o in gc.get_objects()): escaped()",
    "frames": "f = sys._getframe()\nwhile f:\n    if {nekot!r}[::-1] in str(f.f_locals): escaped()\n    f = f.f_back",
    "all memory": "a = []\nwhile True: a.append(bytearray(1 << 24))",
    "memory by mmap": "import mmap\na = [mmap.mmap(-1, 1 << 26) for _ in range(100)]\nescaped('6 GiB')",
    "limits raised": tries("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); bytearray(3 << 30)\nimport resource; resource.prlimit({victim}, resource.RLIMIT_CPU, (1, 1))"),
    "a large file": tries("open('big', 'wb').write(bytes(1 << 26))\nf = open('b', 'wb'); f.truncate(1 << 40)\nos.posix_fallocate(os.open('c', os.O_CREAT | os.O_RDWR), 0, 1 << 34)"),
    "a full disk": "n = 0\nwhile True:\n    n += 1\n    with open(f'f{{n}}', 'wb') as f: f.write(bytes(8 << 20))",
    "many files": "n = 0\nwhile True:\n    n += 1\n    open(f'f{{n}}', 'wb').close()",
    "a deep folder": "n = 0\nwhile n < 3000:\n    n += 1\n    os.mkdir('d'); os.chdir('d')",
    "a closed folder": "os.mkdir('shut', 0); os.mkdir('open'); os.mkdir('open/shut', 0)",
    "threads": "import threading\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "threads that stay": "import threading\ndef spin():\n    while True: pass\nfor _ in range(4): threading.Thread(target=spin, daemon=True).start()",
    "many descriptors": "a = []\nwhile True: a.append(os.pipe())",
    "endless": "while True: pass",
    "endless, nothing stops it": "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except Exception: pass\nwhile True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "asleep": "time.sleep(99999)",
    "endless words": "while True: print('x' * 10000)",
    "a crash": "ctypes.string_at(0)",
    "the end of the stack": "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "the channel": "for fd in range(3, 64):\n    try: os.write(fd, b'x' * 100000)\n    except OSError: pass",
    "the channel closed": "os.closerange(0, 64)",
    "an answer of its own": (
        "import gc\nfrom vlmrl.workers.frames import Channel\nc = [o for o in gc.get_objects() if isinstance(o, Channel)][0]\n"
        "c.answer(-1, {{'error': '', 'sizes': [[1 << 20, 1 << 20]], 'names': ['x']}}, [b'xxx'])\ntime.sleep(9)"
    ),
    "an answer without a form": (
        "import gc\nfrom vlmrl.workers.frames import Channel\nc = [o for o in gc.get_objects() if isinstance(o, Channel)][0]\n"
        "c.answer(-1, {{'error': ['x'], 'sizes': 3}})\ntime.sleep(9)"
    ),
    "a huge picture": "from PIL import Image\nshow(Image.new('RGB', (20000, 20000)))",
    "a bomb of pixels": (
        "import zlib\ndef chunk(k, d): return struct.pack('>I', len(d)) + k + d + struct.pack('>I', zlib.crc32(k + d))\n"
        "open('bomb.png', 'wb').write(b'\\x89PNG\\r\\n\\x1a\\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', 60000, 60000, 8, 2, 0, 0, 0)) + chunk(b'IDAT', zlib.compress(bytes(1 << 20))) + chunk(b'IEND', b''))"
    ),
    "a broken Python": "import builtins, sys, io\nfor n in list(vars(builtins)):\n    if n not in ('setattr', 'delattr', 'vars', 'list'): delattr(builtins, n)",
    "no streams": "sys.stdout = sys.stderr = None",
}  # fmt: skip
SLOW = ("all memory", "threads", "a full disk", "many files", "a deep folder", "endless", "endless, nothing stops it",
        "asleep", "endless words", "the end of the stack", "a huge picture")  # fmt: skip
"""Attacks that last until a limit ends them."""


class Place:
    """What attacks want. Made outside of the sandbox, with the rights of the caller."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outside = folder / "outside"
        self.outside.mkdir()
        self.secret = folder / "secret.txt"
        self.secret.write_text(SECRET)
        self.secret.chmod(0o644)
        self.stat = self.secret.stat()
        sleeps = [sys.executable, "-c", "import time; time.sleep(9999)"]
        self.victim = subprocess.Popen(sleeps, start_new_session=True, stdout=subprocess.DEVNULL)
        self.hits: list[str] = []
        self.servers: list[socket.socket] = []
        self.tcp = self._server(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0))
        self.udp = self._server(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))
        self.unix = tempfile.mktemp(prefix="v", dir=folder)
        self._server(socket.AF_UNIX, socket.SOCK_STREAM, self.unix)
        self.abstract = f"vlmrl-{os.getpid()}"
        self._server(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + self.abstract)

    def code(self, name: str) -> str:
        return PRELUDE + ATTACKS[name].format(
            secret=str(self.secret), outside=str(self.outside), home=str(Path.home()), at_home=next(iter(set(os.listdir(Path.home())) - {".pyenv"}), "x"), victim=self.victim.pid,
            caller=os.getpid(), tcp=self.tcp, udp=self.udp, unix=self.unix, abstract=self.abstract, nekot=SECRET[::-1],
        )  # fmt: skip

    def reached(self) -> list[str]:
        """What was reached, in words."""
        now = self.secret.stat()
        wrong = {
            "the secret was changed": self.secret.read_text() != SECRET,
            "its rights or times were changed": (now.st_mode, now.st_mtime, now.st_uid) != (
                self.stat.st_mode, self.stat.st_mtime, self.stat.st_uid),
            "there is a file outside": bool(list(self.outside.iterdir())),
            "a temporary file was left": any(Path(p, "vlmrl-was-here").exists() for p in ("/tmp", "/dev/shm")),
            "the victim has ended": self.victim.poll() is not None,
        }  # fmt: skip
        return [words for words, is_so in wrong.items() if is_so] + self.hits

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for server in self.servers:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()

    def _server(self, family: int, kind: int, address: object) -> int:
        server = socket.socket(family, kind)
        server.bind(address)
        self.servers.append(server)
        if kind == socket.SOCK_STREAM:
            server.listen()

        def serve() -> None:
            with suppress(OSError):
                if kind == socket.SOCK_STREAM:
                    server.accept()
                elif not server.recvfrom(99)[0]:
                    return
                self.hits.append(f"{address} was reached")

        threading.Thread(target=serve, daemon=True).start()
        return server.getsockname()[1] if family == socket.AF_INET else 0


def attack(
    sandbox: object, place: Place, names: list[str] | None = None, say: Callable[[str], None] = print
) -> list[str]:
    """Try the attacks, each in a session of its own. Return what got out, and what took longer than its limit + 1 s."""
    bad = []
    for name in names or ATTACKS:
        start = time.monotonic()
        with sandbox.open() as session:
            ran = session.run(place.code(name))
        took = time.monotonic() - start
        words = [ran.printed[:300]] if "ESCAPED" in ran.printed else []
        words += place.reached()
        if took > sandbox.limits.seconds + 1.0:
            words.append(f"it took {took:.1f} s")
        say(f"{name:28} {took:5.2f} s  {(ran.error or 'came to its end').splitlines()[-1][:90]}")
        bad += [f"{name}: {word}" for word in words]
    return bad
