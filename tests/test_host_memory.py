"""Free main memory on machines and in containers of every kind: files as Linux writes them."""

import weakref

import numpy as np
import pytest

from numbagpt.device import HostDevice
from numbagpt.host_memory import free_memory

MIB = 1 << 20
MEMINFO = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 0\n"
MACHINE = 8192 * MIB


@pytest.fixture
def system(tmp_path):
    """Writes the files of a machine with 8 GiB to be had; returns what is free there."""

    def write_and_ask(files):
        for name, text in ({"proc/meminfo": MEMINFO} | files).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(str(text))
        return free_memory(tmp_path)

    return write_and_ask


def version_2(folder, limit, used, active=0, inactive=0):
    stat = f"anon 77\nfile 99\ninactive_file {inactive * MIB}\nactive_file {active * MIB}\n"
    limit = limit if limit == "max" else limit * MIB
    files = {"max": f"{limit}\n", "current": f"{used * MIB}\n", "stat": stat}
    return {f"sys/fs/cgroup/{folder}memory.{name}": text for name, text in files.items()}


def version_1(folder, limit, used, active=0, inactive=0):
    stat = (
        f"active_file 1\ntotal_inactive_file {inactive * MIB}\ntotal_active_file {active * MIB}\n"
    )
    files = {"limit_in_bytes": limit * MIB, "usage_in_bytes": used * MIB, "stat": stat}
    return {f"sys/fs/cgroup/memory/{folder}memory.{name}": text for name, text in files.items()}


IN_2 = {"proc/self/cgroup": "0::/\n"}
IN_1 = {"proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/\n"}
BELOW = {"proc/self/cgroup": "0::/user.slice/job\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, MACHINE, id="no groups"),
        pytest.param(IN_2, MACHINE, id="no limit at the top"),
        pytest.param(IN_2 | version_2("", "max", 100), MACHINE, id="2, no limit"),
        pytest.param(IN_2 | version_2("", 2048, 500), 1548 * MIB, id="2"),
        pytest.param(IN_2 | version_2("", 2048, 500, 100, 300), 1948 * MIB, id="2, files read"),
        pytest.param(IN_2 | version_2("", 1 << 20, 500), MACHINE, id="2, above the machine's"),
        pytest.param(IN_2 | version_2("", 500, 600), 0, id="2, above the limit"),
        pytest.param(BELOW | version_2("user.slice/job/", 900, 100), 800 * MIB, id="2, below"),
        pytest.param(
            BELOW | version_2("user.slice/job/", 900, 100) | version_2("user.slice/", 950, 450),
            500 * MIB,
            id="2, the group above allows less",
        ),
        pytest.param(BELOW | version_2("", 700, 100), 600 * MIB, id="2, a path of the host's"),
        pytest.param(IN_1 | version_1("docker/abc/", 1024, 24), 1000 * MIB, id="1"),
        pytest.param(IN_1 | version_1("", 1024, 524, 10, 20), 530 * MIB, id="1, files read"),
        pytest.param(IN_1 | version_1("", (1 << 63) // MIB, 24), MACHINE, id="1, no limit"),
    ],
)
def test_free_memory(system, files, expected):
    assert system(files) == expected


def test_where_it_is_not_known(system, tmp_path):
    assert free_memory(tmp_path) is None
    assert system({"proc/meminfo": "MemTotal: 16777216 kB\n"}) is None


def test_of_this_machine():
    free = HostDevice("cpu").free_memory()
    assert free is None or free > 0


def test_what_a_dropped_model_took_is_asked_for_first():
    cycle = [np.zeros(4)]
    cycle.append(cycle)
    array = weakref.ref(cycle[0])
    del cycle
    HostDevice("cpu").free_memory()
    assert array() is None
