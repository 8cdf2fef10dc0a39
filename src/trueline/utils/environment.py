"""What the environment says. Only this file and device.py read it; no torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PREFIX = "TRUELINE_"


def cache_directory() -> Path:
    """Where compiled kernels are kept between runs."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "trueline"


def native_target() -> str:
    """What the C++ kernels are compiled for: TRUELINE_NATIVE_TARGET, else the machine's own CPU."""
    return os.environ.get("TRUELINE_NATIVE_TARGET") or "native"


def calm_openmp() -> None:
    """PyTorch's threads look for work for some milliseconds after each operation (GCC's OpenMP),
    on the cores that our kernels want, or others' programs. Counts for a process that has not
    imported PyTorch yet; what the user has set stays."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


def environment_with_key(key: str) -> dict[str, str]:
    """For a server of our own: everything as it is, but for the API key."""
    return {**os.environ, "TRUELINE_API_KEY": key}


def environment_with_temp(directory: str) -> dict[str, str]:
    """For a process whose temporary files are to be seen."""
    return {**os.environ, "TMPDIR": directory}


def environment_setting(name: str) -> str | None:
    """Of an option: --max-num-seqs is TRUELINE_MAX_NUM_SEQS."""
    return os.environ.get(PREFIX + name.upper())


def environment_names() -> list[str]:
    """As options are written, of all that begin as ours do; some may be others'."""
    return [name.removeprefix(PREFIX).lower() for name in os.environ if name.startswith(PREFIX)]


def bare_environment() -> dict[str, str]:
    """For a process that must not see our keys."""
    names = ("PATH", "LD_LIBRARY_PATH", "LANG", "TZ")
    return {name: os.environ[name] for name in names if name in os.environ}


def notify_socket() -> str | None:
    """Where systemd listens for how a service is."""
    return os.environ.get("NOTIFY_SOCKET") or None


def hub_cache() -> Path:
    """Where Hugging Face's tools put models."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(named or f"{home}/hub")).expanduser()


# -- who has the cores, as Linux counts it ---------------------------------------------


def busy_seconds() -> float:
    """Of all cores and everybody, what the machine below has taken away included; 0 where nobody
    counts."""
    counts = _counts("stat").split("\n", 1)[0].split()[1:]
    # further ones are in these a second time; the fourth and fifth are idle and waiting for disks
    busy = [int(count) for i, count in enumerate(counts[:8]) if i not in (3, 4)]
    return sum(busy) / os.sysconf("SC_CLK_TCK")


def process_seconds(pid: int) -> float:
    # the second field is the program's name, which may hold anything
    fields = _counts(f"{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def address_space_bytes() -> int:
    """Of this process; 0 where nobody counts."""
    pages = _counts("self/statm").split()[:1]
    return sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE")


def child_processes(pid: int) -> list[int]:
    return list(map(int, _counts(f"{pid}/task/{pid}/children").split()))


def open_sockets(pid: int) -> set[str]:
    """By inode: whoever else has one has it under the same."""
    found = set()
    for each in Path("/proc", str(pid), "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.add(os.readlink(each))
    return {name[8:-1] for name in found if name.startswith("socket:[")}


def listening_sockets() -> set[str]:
    """Of everybody: TCP sockets on which somebody accepts connections, by inode."""
    state, inode, listens = 3, 9, "0A"
    text = _counts("self/net/tcp") + _counts("self/net/tcp6")
    lines = [line.split() for line in text.splitlines()]
    return {line[inode] for line in lines if line[state] == listens}


def shared_memory() -> set[str]:
    """Names of this machine's."""
    return set(os.listdir("/dev/shm"))


def _counts(name: str) -> str:
    try:
        return Path("/proc", name).read_text()
    except OSError:
        return ""


def launcher_settings() -> dict[str, str]:
    """What torchrun tells the programs that it starts."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
             "TORCHELASTIC_USE_AGENT_STORE")  # fmt: skip
    return {name: os.environ[name] for name in names if name in os.environ}
