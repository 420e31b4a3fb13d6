"""Linux namespaces, mounts and privileges by system call: the wall around a sandbox.

The zygote builds one small read-only root (``enter_root``) that shows the system's programs, the Python
installation and nothing else of the host. Each sandbox copies that view and adds a private ``/proc`` and private,
size-limited folders that can be written (``enter_sandbox``), then gives up every privilege. The order matters: the
sandbox's own user namespace is made last, so nothing inside it has a capability over the mounts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Collection

from hintloop.envs.sandbox import layout, limits
from hintloop.envs.sandbox.layout import WORKSPACE

NAMESPACES = {
    "user": 0x10000000,
    "pid": 0x20000000,
    "mount": 0x00020000,
    "net": 0x40000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
}
"""Name -> clone flag, in the order in which isolation is reported."""
_UNPRIVILEGED = 65532
"""Host uid of a sandbox when the server runs as root."""
_ROOT_SIZE = 32 * limits.MiB
_INSIDE = 1000
"""Uid that a process in the sandbox sees for itself."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/shm": "/tmp",
    "/var/tmp": "/tmp",
    **dict.fromkeys(layout.WORKSPACE_NAMES, WORKSPACE),
}
_FILES = {
    "/etc/passwd": f"agent:x:{_INSIDE}:{_INSIDE}::{WORKSPACE}:/bin/sh\n",
    "/etc/group": f"agent:x:{_INSIDE}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
}

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_SYS_PIVOT_ROOT, _SYS_MOUNT_SETATTR = {"x86_64": (155, 442), "aarch64": (41, 442)}.get(
    os.uname().machine, (0, 0)
)
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_CAPABILITY_VERSION = 0x20080522

_Attributes, _CapabilityHeader, _Capabilities = ctypes.c_uint64 * 4, ctypes.c_uint32 * 2, ctypes.c_uint32 * 6
_libc = ctypes.CDLL(None, use_errno=True)
_NAMES = ("capset", "mount", "prctl", "setns", "sethostname", "syscall", "umount2", "unshare")
_libc_functions = {name: getattr(_libc, name) for name in _NAMES}
"""Looked up once here, not in every fork."""


def _call(name: str, *args: object) -> None:
    if _libc_functions[name](*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _syscall(number: int, *args: object) -> None:
    if number == 0 or _libc_functions["syscall"](number, *args) != 0:
        raise OSError(ctypes.get_errno(), f"system call {number} failed")


def unshare(names: Collection[str]) -> None:
    """Leave the named namespaces for new ones."""
    flags = sum(NAMESPACES[name] for name in names)
    if flags:
        _call("unshare", flags)


def rejoin_pid_namespace(fd: int) -> None:
    """Make the next children be born in the pid namespace of ``fd`` again."""
    _call("setns", fd, NAMESPACES["pid"])


def works(attempt: Callable[[], None]) -> bool:
    """Whether ``attempt`` succeeds in a child process that is then thrown away."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            attempt()
            code = 0
        except (OSError, AttributeError):
            code = 1
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def enter_root(fill: Callable[[str], None] = lambda root: None) -> None:
    """Move this process into a private mount namespace whose root is small and read-only. ``OSError``.

    ``fill`` may put more into the root before that.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        unshare(["mount"])
    else:
        unshare(["user", "mount"])
        _map_ids(uid, uid, gid, gid)
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    sources = {path: os.open(path, os.O_PATH) for path in _shown()}
    root = "/tmp"
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID, f"size={_ROOT_SIZE},mode=0755")
    for folder in ("/dev", "/etc", "/proc", "/tmp", "/var", WORKSPACE, *layout.VERIFIER):
        os.mkdir(root + folder)
    for path, fd in sources.items():
        _show(root, path, fd)
    links = {path: os.readlink(path) for path in _SYSTEM if os.path.islink(path)}
    for path, target in (links | _LINKS).items():
        os.symlink(target, root + path)
    for path, text in _FILES.items():
        with open(root + path, "w", encoding="utf-8") as file:
            file.write(text)
    fill(root)
    os.chdir(root)
    _syscall(_SYS_PIVOT_ROOT, b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")
    _protect("/", _ATTR_RDONLY | _ATTR_NOSUID, recursive=False)
    _check_root()


def _shown() -> list[str]:
    paths = [path for path in _SYSTEM if os.path.exists(path) and not os.path.islink(path)]
    prefix = os.path.realpath(sys.base_prefix)
    if not any(prefix == path or prefix.startswith(path + "/") for path in paths):
        paths.append(prefix)
    return [*paths, "/proc", *(f"/dev/{name}" for name in _DEVICES)]


def _show(root: str, path: str, fd: int) -> None:
    """Bind what ``fd`` is (``path`` on the host) to the same path under ``root``, read-only but for /proc."""
    target = root + path
    if os.path.isdir(f"/proc/self/fd/{fd}"):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(f"/proc/self/fd/{fd}", target, None, _MS_BIND | _MS_REC)
    os.close(fd)
    if path.startswith("/dev/"):
        _protect(target, _ATTR_NOSUID, recursive=False)
    elif path != "/proc":
        _protect(target, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, recursive=True)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _call("mount", *texts, ctypes.c_ulong(flags), None if options is None else options.encode())


def _protect(path: str, attributes: int, *, recursive: bool) -> None:
    wanted = _Attributes(attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    _syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), flags, wanted, ctypes.sizeof(wanted))


def _check_root() -> None:
    """A root without these is of no use: better a truthful report of no isolation than broken sandboxes."""
    with open("/dev/null", "r+b"):
        pass
    os.stat(os.path.realpath(sys.executable))
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 0"], {})
    if os.waitpid(pid, 0)[1] != 0:
        raise OSError("the shell does not run in the sandbox's root")


def enter_sandbox(names: Collection[str], uid: int, gid: int, disk: int) -> None:
    """Make this process, forked from one in the small root, the first of a sandbox without any privilege.

    ``names`` are the namespaces to have; that of process ids is made by whoever forks. ``disk``: bytes of the
    working directory, and of the temp folder. ``OSError``.
    """
    unshare([name for name in ("mount", "net", "ipc", "uts") if name in names])
    flags, own = _MS_NOSUID | _MS_NODEV, f",mode=0700,uid={uid},gid={gid}"
    _mount("tmpfs", WORKSPACE, "tmpfs", flags, room(disk) + own)
    _mount("tmpfs", "/tmp", "tmpfs", flags, room(disk) + ",mode=1777")
    for folder in layout.VERIFIER:
        _mount("tmpfs", folder, "tmpfs", flags, room(limits.VERIFIER) + own)
    if "pid" in names:
        _mount("proc", "/proc", "proc", flags | _MS_NOEXEC)
    if "uts" in names:
        _call("sethostname", b"sandbox", 7)
    os.chdir(WORKSPACE)
    become(uid, gid)
    if "user" in names:
        _call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)
        unshare(["user"])
        _map_ids(_INSIDE, uid, _INSIDE, gid)
        _write("/proc/sys/user/max_user_namespaces", b"0")
    drop_privileges()


def room(size: int) -> str:
    """Options of a tmpfs of so many bytes, with as many files as that allows for."""
    return f"size={size},nr_inodes={size // limits.BYTES_PER_INODE}"


def unprivileged_ids() -> tuple[int, int]:
    """Uid and gid (as this process sees them) that sandboxes run as."""
    return (_UNPRIVILEGED, _UNPRIVILEGED) if os.geteuid() == 0 else (os.geteuid(), os.getegid())


def become(uid: int, gid: int) -> None:
    """Change to the given ids for good, when this process is root.

    The saved group differs, which no program that is then executed keeps. So the kernel does not take one for
    the same user as the other, who might change its limits (``prlimit``).
    """
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(gid, gid, gid + 1)
        os.setresuid(uid, uid, uid)


def drop_privileges() -> None:
    """No capability, none to gain, and closed to the eyes of other processes of the same user."""
    header = _CapabilityHeader(_CAPABILITY_VERSION, 0)
    _call("capset", header, _Capabilities())
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)


def die_with_parent() -> None:
    """SIGKILL this process when the thread that forked it ends."""
    _call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs, where there is no pid namespace to do that."""
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _map_ids(uid_inside: int, uid: int, gid_inside: int, gid: int) -> None:
    _write("/proc/self/setgroups", b"deny")
    _write("/proc/self/uid_map", b"%d %d 1" % (uid_inside, uid))
    _write("/proc/self/gid_map", b"%d %d 1" % (gid_inside, gid))


def _write(path: str, data: bytes) -> None:
    """Write to a file of the kernel. By hand: opening a text file would load modules in every fork."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
