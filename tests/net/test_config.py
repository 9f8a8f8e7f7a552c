"""The environment: what is missing or makes no sense is named, with what to do."""

import base64
import os
import random
import re
from pathlib import Path

import pytest

from bagua.config import is_launched, launch_environment, settings
from bagua.errors import InvalidArgument

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def without(*names):
    return {name: value for name, value in TORCHRUN.items() if name not in names}


def test_torchruns_environment():
    launch = launch_environment(environ=TORCHRUN)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.node_rank) == (3, 8, 1, 1)
    assert (launch.master_addr, launch.master_port, launch.use_agent_store) == ("10.0.0.1", 29500, True)
    assert (launch.restart_count, launch.single_host) == (2, False)
    assert launch_environment(environ={**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}).single_host


def test_the_node_rank_of_other_launchers():
    assert launch_environment(environ={**without("GROUP_RANK"), "NODE_RANK": "3"}).node_rank == 3
    assert launch_environment(environ={**TORCHRUN, "NODE_RANK": "3"}).node_rank == 1
    assert launch_environment(environ=without("GROUP_RANK")).node_rank == 0


def test_arguments_win_over_the_environment():
    launch = launch_environment(rank=0, world_size=2, environ=TORCHRUN)
    assert (launch.rank, launch.world_size) == (0, 2)
    launch = launch_environment(rank=0, world_size=2, needs_master=False, environ={})
    assert (launch.rank, launch.world_size, launch.local_rank, launch.restart_count) == (0, 2, None, 0)


@pytest.mark.parametrize(("name", "empty"), [("RANK", False), ("MASTER_ADDR", True)], ids=["missing", "empty"])
def test_a_missing_variable_is_named(name, empty):
    environ = {**TORCHRUN, name: ""} if empty else without(name)
    with pytest.raises(InvalidArgument, match=f"the environment has no {name}, .*torchrun --nproc-per-node"):
        launch_environment(environ=environ)


def test_all_missing_variables_are_named_at_once():
    with pytest.raises(InvalidArgument, match="no RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, which"):
        launch_environment(environ={})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "8"}, r"rank 8 is not in 0\.\.7 \(world_size is 8\)"),
        ({"RANK": "one"}, "RANK='one' is not an integer"),
        ({"MASTER_PORT": "70000"}, r"MASTER_PORT=70000 is out of range; give a value in 0\.\.65535"),
    ],
    ids=str,
)
def test_nonsense_is_named(changes, message):
    with pytest.raises(InvalidArgument, match=message):
        launch_environment(environ={**TORCHRUN, **changes})


def test_is_launched():
    assert is_launched(TORCHRUN)
    assert not is_launched(without("RANK")) and not is_launched({})


def test_settings_and_their_defaults():
    default = settings({})
    assert default.shared_memory and default.interface is None and default.spin_us is None
    assert default.auth_token is None and default.backend == "auto"
    changed = settings({"BAGUA_SHARED_MEMORY": "0", "BAGUA_SPIN_US": "0", "BAGUA_SOCKET_IFNAME": "eth7"})
    assert default.thresholds == {}
    assert settings({"BAGUA_THRESHOLDS": "a=1, b=20"}).thresholds == {"a": 1, "b": 20}
    assert (changed.shared_memory, changed.spin_us, changed.interface) == (False, 0, "eth7")
    assert settings({"BAGUA_BACKEND": "torch"}).backend == "torch"
    assert default.tcp_congestion == "auto"
    assert settings({"BAGUA_TCP_CONGESTION": "cubic"}).tcp_congestion == "cubic"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"BAGUA_TCP_STREAM": "4"}, "BAGUA_TCP_STREAM is not a setting of bagua; write BAGUA_TCP_STREAMS, if"),
        ({"BAGUA_TCP_STREAMS": "0"}, r"BAGUA_TCP_STREAMS=0 is out of range; give a value in 1\.\.64"),
        ({"BAGUA_TCP_CONGESTION": "Cubic, reno"}, "BAGUA_TCP_CONGESTION='Cubic, reno' is no name"),
        ({"BAGUA_SHM_RING_BYTES": "5000"}, "BAGUA_SHM_RING_BYTES=5000 is not a power of two"),
        ({"BAGUA_SHARED_MEMORY": "yes"}, "BAGUA_SHARED_MEMORY='yes' is not an integer"),
        ({"BAGUA_THRESHOLDS": "a=1,b=-2"}, "BAGUA_THRESHOLDS has 'b=-2'"),
        ({"BAGUA_AUTH_TOKEN": ""}, "BAGUA_AUTH_TOKEN has 0 characters that are too easy to guess"),
        ({"BAGUA_AUTH_TOKEN": "ab" * 50}, "at most 6 bits, expected 76.; make one with `bagua token`"),
        ({"BAGUA_AUTH_TOKEN": "0123456789abcdef" * 2}, "has 32 characters that are too easy to guess"),
        ({"BAGUA_AUTH_TOKEN": "correct horse battery"}, "has 21 characters that are too easy to guess"),
        ({"BAGUA_BACKEND": "mpi"}, "BAGUA_BACKEND='mpi' is unknown; the backends are auto, native, nccl, torch"),
    ],
    ids=str,
)
def test_a_setting_that_nothing_reads_or_that_makes_no_sense(environ, message):
    with pytest.raises(InvalidArgument, match=message):
        settings(environ)


def test_what_a_token_is():
    # Of 128 random bits, as text: with 12 different characters, as one in 30,000 has, and 11, one in half a million.
    for unlikely in ("reuimrOSx4OexeDrmufi4Q", "reuimrOSx4OereDrmuii4Q"):
        assert settings({"BAGUA_AUTH_TOKEN": unlikely}).auth_token == unlikely
    random_bytes = random.Random(0).randbytes
    for number in range(300):  # what people make tokens with: 128 random bits, as text of either kind
        for token in (base64.urlsafe_b64encode(random_bytes(16)).rstrip(b"=").decode(), random_bytes(16).hex()):
            assert settings({"BAGUA_AUTH_TOKEN": token}).auth_token == token, number
            assert token not in repr(settings({"BAGUA_AUTH_TOKEN": token}))
    with pytest.raises(InvalidArgument, match="has 4151 characters, expected at most 4096 bytes"):
        settings({"BAGUA_AUTH_TOKEN": str(3**8700)})


def test_what_a_file_with_a_token_is(tmp_path):
    pipe, folder, binary = (tmp_path / name for name in ("pipe", "folder", "binary"))
    os.mkfifo(pipe, 0o600)
    folder.mkdir(0o700)
    binary.write_bytes(bytes(range(256)))
    binary.chmod(0o600)
    for path, problem in (
        (pipe, "no regular file"),
        (folder, "director|no regular"),
        (binary, "its content is no text"),
    ):
        with pytest.raises(InvalidArgument, match=f"BAGUA_AUTH_TOKEN_FILE='{path}'.*({problem})"):
            settings({"BAGUA_AUTH_TOKEN_FILE": str(path)})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TCP_STREMS", "TCP_STREAMS"),  # one letter missing; two exchanged
        ("BACKNED", "BACKEND"),
        ("STREAMS", "TCP_STREAMS"),  # a word missing, or too much
        ("TOKEN_FILE", "AUTH_TOKEN_FILE"),
        ("tcp_congestion", "TCP_CONGESTION"),
    ],
)
def test_a_misspelt_setting(name, meant):
    with pytest.raises(InvalidArgument, match=f"BAGUA_{name} is not a setting of bagua; write BAGUA_{meant}, if"):
        settings({f"BAGUA_{name}": "1"})


def test_variables_of_others_are_none_of_our_business():
    others = {"BAGUA", "TORCH_BAGUA_X", "BAGUA_CUDA"}
    others |= {"BAGUA_HOME", "BAGUA_VERSION", "BAGUA_TIMEOUT", "BAGUA_JOB_NAME", "BAGUA_NUM_NODES", "BAGUA_LOG_LEVEL"}
    # As in the Kubernetes documentation, for services of these names.
    for service in ("BAGUA", "BAGUA_MASTER", "BAGUA_TIMEOUT", "BAGUA_TCP_STREAMS", "BAGUA_BACKEND", "BAGUA_SPIN_US_0"):
        others |= {f"{service}_SERVICE_HOST", f"{service}_SERVICE_PORT", f"{service}_SERVICE_PORT_HTTP"}
        others |= {f"{service}_PORT", f"{service}_PORT_29500_TCP", f"{service}_PORT_53_UDP"}
        others |= {f"{service}_PORT_29500_TCP_{what}" for what in ("PROTO", "PORT", "ADDR")}
    assert settings(dict.fromkeys(others, "tcp://10.0.0.11:29500")) == settings({})


def test_variables_of_the_build_may_still_be_there():
    setup = Path(__file__).resolve().parents[2] / "setup.py"
    read = set(re.findall(r'environ\.get\("(BAGUA_\w+)"', setup.read_text()))
    assert "BAGUA_CMAKE_ARGS" in read
    assert settings(dict.fromkeys(read, "anything")) == settings({})


@pytest.mark.parametrize("address", ["h\udcffst", "a..b"])
def test_a_master_address_that_is_no_name(address):
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": address, "MASTER_PORT": "1"}
    with pytest.raises(InvalidArgument, match="MASTER_ADDR=.* is no host name"):
        launch_environment(environ=environ)
