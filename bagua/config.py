"""The only reader of os.environ.

It reads the variables that torchrun sets (RANK, WORLD_SIZE, ...) and bagua's own (BAGUA_*), which tune the transports.
A misspelt setting that is silently ignored costs days, so a BAGUA_ variable whose name is close to that of a setting is
an error. Others are ignored, because Kubernetes makes such variables from the names of services.
"""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .errors import InvalidArgument

__all__ = [
    "BACKENDS",
    "LaunchEnvironment",
    "Settings",
    "checked_token",
    "is_launched",
    "launch_environment",
    "settings",
]

BACKENDS = ("auto", "native", "nccl", "torch")

# setup.py reads these (a structure test compares), so the environment that built the package may still hold them.
_READ_BY_THE_BUILD = {"BAGUA_BUILD_DIR", "BAGUA_CMAKE_ARGS", "BAGUA_CUDA", "BAGUA_SKIP_NATIVE"}

# Kubernetes sets variables with these endings in every container, for each service of its namespace.
_SERVICE_ENDING = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$")
# checked_token underestimates random characters, because some occur twice. At 76, one in ten million tokens of 128
# random bits (22 characters) is refused, at 80 one in 30,000. `bagua token` prints twice as many bits.
_MIN_TOKEN_BITS = 76
_MAX_TOKEN_BYTES = 4096
# The similarity, from 0 to 1, from which a name counts as a misspelling: TCP_STREAM and STREAMS are close to
# TCP_STREAMS, TIMEOUT is close to no setting.
_MIN_SIMILARITY = 0.72

_LAUNCH_HELP = (
    "start the program with `bagua run --nproc-per-node N script.py` or `torchrun --nproc-per-node N script.py`; for "
    "Slurm, Kubernetes and mpirun see docs/launching.md"
)


@dataclass(frozen=True)
class LaunchEnvironment:
    """The variables that torchrun sets for one process."""

    rank: int
    world_size: int
    local_rank: int | None  # None: not started by torchrun; the rank's position on its host is used
    local_world_size: int  # ranks that were started on this host, according to the launcher
    node_rank: int
    master_addr: str
    master_port: int
    use_agent_store: bool
    restart_count: int
    single_host: bool  # all ranks were started on this host, according to the launcher


@dataclass(frozen=True)
class Settings:
    """The values of bagua's own variables; a default for each that is not set."""

    interface: str | None  # BAGUA_SOCKET_IFNAME: network interface (or its address) to listen on, e.g. "eth0"
    tcp_streams: int  # BAGUA_TCP_STREAMS: TCP connections per peer
    # BAGUA_TCP_CONGESTION: their congestion control, a name such as "cubic", "system" for the system's, or "auto"
    tcp_congestion: str
    shm_ring_bytes: int  # BAGUA_SHM_RING_BYTES: per direction and peer of the same host
    spin_us: float | None  # BAGUA_SPIN_US: time that a waiting worker polls before it sleeps; None: by core count
    shared_memory: bool  # BAGUA_SHARED_MEMORY=0: TCP even between ranks of one host
    # BAGUA_HEARTBEAT_TIMEOUT: seconds within which a silent peer is reported
    heartbeat_timeout_s: float
    # BAGUA_AUTH_TOKEN, or the content of the file BAGUA_AUTH_TOKEN_FILE: the default of init_process_group's auth_token
    auth_token: str | None = field(repr=False)
    # BAGUA_THRESHOLDS, such as "direct_bytes=0,pairwise_bytes=4096": sizes at which a collective changes from one
    # algorithm to another, in place of the measured defaults (csrc/collectives/thresholds.h, docs/collectives.md)
    thresholds: dict[str, int]
    backend: str  # BAGUA_BACKEND: the backend where the program passes none to init_process_group


def _integer(environ: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = environ.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise InvalidArgument(f"{name}={text!r} is not an integer; give a value in {low}..{high}") from None
    if not low <= value <= high:
        raise InvalidArgument(f"{name}={value} is out of range; give a value in {low}..{high}")
    return value


def _seconds(environ: Mapping[str, str], name: str, default: float, low: float, high: float) -> float:
    text = environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise InvalidArgument(f"{name}={text!r} is not a number of seconds; give {low:g}..{high:g}") from None
    if not low <= value <= high:  # a NaN fails too
        raise InvalidArgument(f"{name}={text} is out of range; give {low:g}..{high:g} seconds")
    return value


def launch_environment(
    rank: int | None = None,
    world_size: int | None = None,
    needs_master: bool = True,
    environ: Mapping[str, str] | None = None,
) -> LaunchEnvironment:
    """Reads torchrun's variables; arguments that are given win over the environment.

    Args:
        rank, world_size: as given to init_process_group, or None.
        needs_master: MASTER_ADDR and MASTER_PORT must be set; False if the caller passes a store.

    Raises:
        InvalidArgument: a variable is missing or invalid; all missing ones are named.
    """
    env = os.environ if environ is None else environ
    needed = [name for name, given in (("RANK", rank), ("WORLD_SIZE", world_size)) if given is None]
    needed += ["MASTER_ADDR", "MASTER_PORT"] if needs_master else []
    missing = [name for name in needed if not env.get(name)]
    if missing:
        raise InvalidArgument(
            f"the environment has no {', '.join(missing)}, which init_process_group needs; {_LAUNCH_HELP}, "
            "or pass store=, rank= and world_size="
        )
    master_addr = env.get("MASTER_ADDR", "127.0.0.1")
    try:
        master_addr.encode("idna")
    except UnicodeError:
        raise InvalidArgument(
            f"MASTER_ADDR={master_addr!r} is no host name; give a name or an address of rank 0's host"
        ) from None
    world_size = _integer(env, "WORLD_SIZE", 1, 1, 1 << 20) if world_size is None else world_size
    rank = _integer(env, "RANK", 0, 0, 1 << 20) if rank is None else rank
    if not 0 <= rank < world_size:
        raise InvalidArgument(f"rank {rank} is not in 0..{world_size - 1} (world_size is {world_size})")
    local_world_size = _integer(env, "LOCAL_WORLD_SIZE", 1, 1, 1 << 20)
    return LaunchEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(env, "LOCAL_RANK", 0, 0, 1 << 20) if "LOCAL_RANK" in env else None,
        local_world_size=local_world_size,
        # Launchers before torchrun, and some schedulers, call it NODE_RANK.
        node_rank=_integer(env, "GROUP_RANK" if "GROUP_RANK" in env else "NODE_RANK", 0, 0, 1 << 20),
        master_addr=master_addr,
        master_port=_integer(env, "MASTER_PORT", 0, 0, 65535),
        use_agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restart_count=restart_count(env),
        single_host=local_world_size == world_size,
    )


def restart_count(environ: Mapping[str, str] | None = None) -> int:
    """The number of times that the launcher has restarted the ranks.

    It distinguishes keys of this attempt from earlier ones in a store that outlives the ranks.
    """
    return _integer(os.environ if environ is None else environ, "TORCHELASTIC_RESTART_COUNT", 0, 0, 1 << 30)


def cache_folder() -> Path:
    """Returns the folder of this user's measurements, which may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bagua"


def is_launched(environ: Mapping[str, str] | None = None) -> bool:
    """Returns True if a launcher has set this process's rank in the environment."""
    env = os.environ if environ is None else environ
    return "RANK" in env and "WORLD_SIZE" in env


def settings(environ: Mapping[str, str] | None = None, changes: Mapping[str, str] | None = None) -> Settings:
    """Reads bagua's own variables; `changes` win over the environment.

    Raises:
        InvalidArgument: a value is out of range, or the name of a BAGUA_ variable is close to that of a setting.
    """
    env = {**(os.environ if environ is None else environ), **(changes or {})}
    known = {
        "BAGUA_SOCKET_IFNAME",
        "BAGUA_TCP_STREAMS",
        "BAGUA_TCP_CONGESTION",
        "BAGUA_SHM_RING_BYTES",
        "BAGUA_SPIN_US",
        "BAGUA_SHARED_MEMORY",
        "BAGUA_AUTH_TOKEN",
        "BAGUA_AUTH_TOKEN_FILE",
        "BAGUA_THRESHOLDS",
        "BAGUA_BACKEND",
        "BAGUA_HEARTBEAT_TIMEOUT",
    }
    for name in sorted(name for name in env if name.startswith("BAGUA_") and name not in known | _READ_BY_THE_BUILD):
        meant = _closest_setting(name, known)
        if meant is not None:
            raise InvalidArgument(
                f"{name} is not a setting of bagua; write {meant}, if you mean that; the settings are "
                f"{', '.join(sorted(known))}"
            )
    ring_bytes = _integer(env, "BAGUA_SHM_RING_BYTES", 1 << 20, 1 << 12, 1 << 30)
    if ring_bytes & (ring_bytes - 1):
        raise InvalidArgument(f"BAGUA_SHM_RING_BYTES={ring_bytes} is not a power of two")
    backend = env.get("BAGUA_BACKEND", "auto")
    if backend not in BACKENDS:
        raise InvalidArgument(f"BAGUA_BACKEND={backend!r} is unknown; the backends are {', '.join(BACKENDS)}")
    congestion = env.get("BAGUA_TCP_CONGESTION", "auto")
    if not re.fullmatch(r"[\w.-]{1,15}", congestion, re.ASCII):  # the kernel would truncate a longer name
        raise InvalidArgument(
            f"BAGUA_TCP_CONGESTION={congestion!r} is no name of 1 to 15 characters; give 'auto', 'system', or one "
            "such as 'cubic'"
        )
    spin_us = _integer(env, "BAGUA_SPIN_US", -1, 0, 1_000_000) if "BAGUA_SPIN_US" in env else None
    return Settings(
        interface=env.get("BAGUA_SOCKET_IFNAME"),
        tcp_streams=_integer(env, "BAGUA_TCP_STREAMS", 2, 1, 64),
        tcp_congestion=congestion,
        shm_ring_bytes=ring_bytes,
        spin_us=spin_us,
        shared_memory=_integer(env, "BAGUA_SHARED_MEMORY", 1, 0, 1) == 1,
        heartbeat_timeout_s=_seconds(env, "BAGUA_HEARTBEAT_TIMEOUT", 10.0, 1.0, 3600.0),
        auth_token=_auth_token(env),
        thresholds=_thresholds(env.get("BAGUA_THRESHOLDS", "")),
        backend=backend,
    )


def checked_token(token: str, name: str) -> str:
    """Returns the token, if it is too long and varied to be guessed from the proofs in the store.

    The estimate is its length without repetitions, times the bits per character if all that occur were equally
    frequent; for a sequence such as "abcd..." the bits per step. Words look like random characters to it.

    Args:
        name: the argument or variable that held the token, for messages.

    Raises:
        InvalidArgument: it is too easy to guess; the message does not contain it.
    """
    steps = {ord(after) - ord(before) for before, after in itertools.pairwise(token)}
    length = min(len(token), 2 + len({token[index : index + 3] for index in range(len(token))}))
    bits = length * min(math.log2(len(set(token)) or 1), math.log2(len(steps) or 1))
    if bits < _MIN_TOKEN_BITS:
        raise InvalidArgument(
            f"{name} has {len(token)} characters that are too easy to guess (at most {bits:.0f} bits, expected "
            f"{_MIN_TOKEN_BITS}); make one with `bagua token`"
        )
    if len(token.encode()) > _MAX_TOKEN_BYTES:
        raise InvalidArgument(f"{name} has {len(token)} characters, expected at most {_MAX_TOKEN_BYTES} bytes")
    return token


def _token_of_file(path: str) -> str:
    """Reads the token in a file that no other user can read; white space around it is not part of it.

    Raises:
        InvalidArgument: there is no such file, other users can read or change it, or its token is easy to guess.
    """
    name = f"BAGUA_AUTH_TOKEN_FILE={path!r}"
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # a pipe would block
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidArgument(f"{name}: it is no regular file, which each rank reads by itself; name one")
            content = file.read(_MAX_TOKEN_BYTES + 3)
    except OSError as error:
        raise InvalidArgument(f"{name}: {error.strerror}; name a file that can be read") from None
    # A file of another owner may be readable by its group: an administrator, or Kubernetes, chose that group.
    is_mine = status.st_uid == os.geteuid()
    if status.st_mode & (0o077 if is_mine else 0o007):
        mode = stat.filemode(status.st_mode)
        raise InvalidArgument(f"{name}: others can read or change it ({mode}); run `chmod 600 {path}`")
    try:
        token = content.decode().strip()
    except UnicodeDecodeError:
        raise InvalidArgument(f"{name}: its content is no text; make a token with `bagua token`") from None
    return checked_token(token, name)


def _auth_token(env: Mapping[str, str]) -> str | None:
    token, path = env.get("BAGUA_AUTH_TOKEN"), env.get("BAGUA_AUTH_TOKEN_FILE")
    if token is not None and path is not None:
        raise InvalidArgument("the environment has both BAGUA_AUTH_TOKEN and BAGUA_AUTH_TOKEN_FILE; set one of them")
    if path is not None:
        return _token_of_file(path)
    return None if token is None else checked_token(token, "BAGUA_AUTH_TOKEN")


def _closest_setting(name: str, known: set[str]) -> str | None:
    """Returns the setting that `name` may be a misspelling of."""
    rest = name.removeprefix("BAGUA_").upper()
    if _SERVICE_ENDING.search(name):
        return None
    near = difflib.get_close_matches(
        rest, [setting.removeprefix("BAGUA_") for setting in sorted(known)], 1, _MIN_SIMILARITY
    )
    return f"BAGUA_{near[0]}" if near else None


def _thresholds(text: str) -> dict[str, int]:
    chosen = {}
    for entry in filter(None, text.split(",")):
        name, equals, value = entry.partition("=")
        if not equals or not value.strip().isdecimal():
            raise InvalidArgument(f"BAGUA_THRESHOLDS has {entry!r}; give name=bytes, separated by commas")
        if int(value) >= 2**63 or name.strip() in chosen:
            raise InvalidArgument(f"BAGUA_THRESHOLDS has {entry!r}; give each name once, and less than 2^63 bytes")
        chosen[name.strip()] = int(value)
    return chosen
