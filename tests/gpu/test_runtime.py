"""What is said about the machine, on machines of every kind, and where kernels are cached."""

import functools
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import numba
import pytest
from cuda.bindings import driver
from numba import cuda
from numba.core import config

from numbagpt import cache
from numbagpt.device import select_device
from numbagpt.errors import UserError
from numbagpt.gpu import runtime


@pytest.fixture
def machine(monkeypatch):
    """A machine with all that is needed; the test then takes something away."""

    class Machine:
        def has(self, **answers):
            for name, answer in answers.items():
                monkeypatch.setattr(runtime, f"_{name}", lambda answer=answer: answer)

    machine = Machine()
    machine.has(
        driver_cuda_version=(13, 0),
        initialize="CUDA_SUCCESS",
        compute_capability=(9, 0),
        missing_library=None,
        toolkit_version=(13, 1),
        retain_context="CUDA_SUCCESS",
    )
    monkeypatch.setattr(config, "DISABLE_CUDA", 0)
    monkeypatch.setattr(config, "ENABLE_CUDASIM", 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return machine


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({}, None),
        ({"toolkit_version": (12, 9)}, None),
        ({"driver_cuda_version": (12, 2), "toolkit_version": (12, 9)}, None),
        ({"compute_capability": (7, 5)}, None),
        ({"compute_capability": (12, 0)}, None),
        (
            {"driver_cuda_version": None},
            "no NVIDIA driver found; install one from https://www.nvidia.com/drivers",
        ),
        ({"initialize": "CUDA_ERROR_NO_DEVICE"}, "the NVIDIA driver finds no GPU"),
        (
            {"initialize": "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
            "the NVIDIA driver does not start (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH); "
            "reboot, or reinstall the driver",
        ),
        (
            {"compute_capability": (7, 0)},
            "the GPU has compute capability 7.0; numbagpt needs at least 7.5 (Turing, 2018)",
        ),
        (
            {"driver_cuda_version": (12, 4)},
            "the NVIDIA driver supports CUDA 12.4, older than the installed toolkit, CUDA 13.1; "
            "update the driver, or pip install 'numbagpt[cu12]'",
        ),
        (
            {"driver_cuda_version": (11, 8), "toolkit_version": (12, 9)},
            "the NVIDIA driver supports CUDA 11.8, older than the installed toolkit, CUDA 12.9; "
            "update the driver",
        ),
        (
            {"missing_library": "cuBLAS is missing"},
            "cuBLAS is missing; pip install 'numbagpt[cu13]'",
        ),
        (
            {"missing_library": "cuBLAS is missing", "driver_cuda_version": (12, 8)},
            "cuBLAS is missing; pip install 'numbagpt[cu12]'",
        ),
        (
            {"retain_context": "CUDA_ERROR_OUT_OF_MEMORY"},
            "the GPU takes no further program (CUDA_ERROR_OUT_OF_MEMORY): its memory is full, or "
            "another program has it to itself; end other programs (nvidia-smi lists them)",
        ),
    ],
)
def test_problem_and_fix_are_named(machine, answers, expected):
    machine.has(**answers)
    assert runtime._find_problem() == expected


def test_hidden_gpu(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    machine.has(initialize="CUDA_ERROR_NO_DEVICE")
    assert "CUDA_VISIBLE_DEVICES='7' may hide it" in runtime._find_problem()


@pytest.mark.parametrize("name", ["DISABLE_CUDA", "ENABLE_CUDASIM"])
def test_cuda_switched_off_by_numba(machine, monkeypatch, name):
    monkeypatch.setattr(config, name, 1)
    assert f"NUMBA_{name}" in runtime._find_problem()


def must_not_run():
    raise AssertionError("CUDA was started")


def test_no_driver_means_nothing_is_started(machine, monkeypatch):
    machine.has(driver_cuda_version=None)
    monkeypatch.setattr(runtime, "_initialize", must_not_run)
    assert "no NVIDIA driver" in runtime._find_problem()


def test_no_context_is_made_on_a_machine_that_lacks_something(machine, monkeypatch):
    machine.has(missing_library="cuBLAS is missing")
    monkeypatch.setattr(runtime, "_retain_context", must_not_run)
    assert "cuBLAS is missing" in runtime._find_problem()


def test_a_gpu_that_is_taken(machine, monkeypatch):
    machine.has(retain_context="CUDA_ERROR_DEVICE_UNAVAILABLE")
    monkeypatch.setattr(runtime, "gpu_problem", runtime._find_problem)
    device, problem = select_device("auto")
    assert device.name == "cpu"
    assert problem.startswith("the GPU takes no further program (CUDA_ERROR_DEVICE_UNAVAILABLE)")
    with pytest.raises(UserError, match="--device cuda: the GPU takes no further program"):
        select_device("cuda")


def test_status_of_the_context(monkeypatch):
    status = driver.CUresult.CUDA_ERROR_DEVICE_UNAVAILABLE
    monkeypatch.setattr(driver, "cuDevicePrimaryCtxRetain", lambda gpu: (status, None))
    assert runtime._retain_context() == "CUDA_ERROR_DEVICE_UNAVAILABLE"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((driver.CUresult.CUDA_SUCCESS, 12090), (12, 9)),
        ((driver.CUresult.CUDA_SUCCESS, 13000), (13, 0)),
        ((driver.CUresult.CUDA_SUCCESS, 0), None),
        ((driver.CUresult.CUDA_ERROR_STUB_LIBRARY, 0), None),
        (RuntimeError("libcuda not found"), None),
    ],
)
def test_driver_version(monkeypatch, answer, expected):
    def version():
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(driver, "cuDriverGetVersion", version)
    assert runtime._driver_cuda_version() == expected


@pytest.fixture
def first_look(monkeypatch):
    """Nobody has asked yet whether the GPU can be used."""
    unasked = functools.cache(runtime._check_gpu.__wrapped__)
    monkeypatch.setattr(runtime, "_check_gpu", unasked)


@pytest.mark.usefixtures("first_look")
def test_gpu_problem_never_raises(monkeypatch):
    def broken():
        raise OSError("libnvrtc.so:\nbad magic")

    monkeypatch.setattr(runtime, "_find_problem", broken)
    assert runtime.gpu_problem() == "CUDA cannot be used: OSError: libnvrtc.so:"


@pytest.mark.usefixtures("first_look")
def test_a_problem_that_was_mended_is_none_any_more(machine):
    machine.has(retain_context="CUDA_ERROR_OUT_OF_MEMORY")
    assert "its memory is full" in runtime.gpu_problem()
    machine.has(retain_context="CUDA_SUCCESS")
    assert runtime.gpu_problem() is None
    machine.has(retain_context="never asked again")
    assert runtime.gpu_problem() is None


def test_gpu_info_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(runtime, "gpu_problem", lambda: "no NVIDIA driver found")
    with pytest.raises(UserError, match="no NVIDIA driver found"):
        runtime.gpu_info()


def test_report_runs_as_a_program(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "numbagpt"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"NUMBAGPT_CACHE": str(tmp_path)},
    )
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["Python"].startswith(sys.version.split()[0])
    assert lines["numba"] == numba.__version__
    for name in ("numbagpt", "numpy", "numba-cuda", "cuda-bindings", "cuda-core"):
        assert lines[name][0].isdigit()
    for name in ("toolkit", "driver", "GPU", "cuBLASLt", "kernel", "can"):
        assert name in lines
    assert "Traceback" not in result.stderr


def test_report_survives_broken_parts(monkeypatch):
    def broken():
        raise RuntimeError("nvml is broken\nmore")

    for name in ("_cublas_version", "_describe_driver", "_describe_gpu", "_toolkit_version"):
        monkeypatch.setattr(runtime, name, broken)
    assert runtime.report().count("unknown (nvml is broken)") == 4


# --- caches ---


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NUMBAGPT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.cache_dir() == tmp_path / "home/.cache/numbagpt"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_dir() == tmp_path / "home/.cache/numbagpt"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_dir() == tmp_path / "xdg/numbagpt"
    monkeypatch.setenv("NUMBAGPT_CACHE", "~/mine")
    assert cache.cache_dir() == tmp_path / "home/mine"
    assert cache.cache_dir().is_dir()


def test_cache_dir_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBAGPT_CACHE", str(tmp_path / "file/cache"))
    with pytest.raises(UserError, match=r"cannot make the cache folder .*set NUMBAGPT_CACHE"):
        cache.cache_dir()


def test_cache_dir_of_a_user_that_is_not_known(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NUMBAGPT_CACHE", "~nouser/cache")
    assert cache.cache_dir() == Path("~nouser/cache")
    assert (tmp_path / "~nouser/cache").is_dir()
    monkeypatch.delenv("NUMBAGPT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    # What expanduser answers for a user without $HOME and without an entry in /etc/passwd.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(UserError, match=r"no home folder found .*; set NUMBAGPT_CACHE to"):
        cache.cache_dir()


@pytest.fixture
def numba_config(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBAGPT_CACHE", str(tmp_path))
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setattr(config, "CUDA_LOW_OCCUPANCY_WARNINGS", 1)
    return config


def test_configure_sets_numba_up(numba_config, tmp_path):
    folder = runtime.configure.__wrapped__()
    assert folder.parent == tmp_path / "kernels"
    assert folder.is_dir()
    assert numba_config.CACHE_DIR == str(folder)
    assert numba_config.CUDA_LOW_OCCUPANCY_WARNINGS == 0


def test_configure_leaves_the_users_folder(numba_config, tmp_path):
    numba_config.CACHE_DIR = str(tmp_path / "users")
    assert runtime.configure.__wrapped__() == tmp_path / "users"
    assert not (tmp_path / "kernels").exists()


def test_numba_takes_the_folder_set_at_run_time(numba_config):
    from numba.cuda.dispatcher import CUDACache

    folder = runtime.configure.__wrapped__()
    kernel_cache = CUDACache(runtime.report)
    assert Path(kernel_cache.cache_path).parent == folder
    with runtime.kept_in(folder / "one"):
        kernel_cache = CUDACache(runtime.report)
    assert Path(kernel_cache.cache_path).parent == folder / "one"
    assert numba_config.CACHE_DIR == str(folder)


def test_a_folder_that_cannot_be_written_is_refused(numba_config, monkeypatch, tmp_path):
    """Numba would pass it over and keep the kernels beside the sources."""
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError), runtime.kept_in(tmp_path / "file/one"):
        pass

    def read_only(dir):
        raise PermissionError(dir)

    monkeypatch.setattr(runtime.tempfile, "TemporaryFile", read_only)
    with pytest.raises(PermissionError), runtime.kept_in(tmp_path / "one"):
        pass
    assert numba_config.CACHE_DIR == ""


def test_unwritable_cache_gives_a_temporary_one(numba_config, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBAGPT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(runtime.tempfile, "tempdir", str(tmp_path))
    folder = runtime.configure.__wrapped__()
    assert folder.parent == tmp_path
    assert folder.name.startswith("numbagpt-kernels-")


def test_a_temporary_cache_is_removed_at_the_end(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    cache = {"NUMBAGPT_CACHE": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-m", "numbagpt"]
    report = subprocess.run(
        command, env=os.environ | cache, capture_output=True, text=True, check=True, timeout=120
    )
    assert f"{tmp_path}/tmp/numbagpt-kernels-" in report.stdout
    assert list((tmp_path / "tmp").iterdir()) == []


def test_any_edit_changes_the_hash(tmp_path):
    for name in ("gpu/vec.py", "ops/gelu.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x = 1\n")
    seen = {runtime._sources_hash(tmp_path)}
    assert runtime._sources_hash(tmp_path) in seen
    (tmp_path / "train.py").write_text("x = 2\n")  # not a part of any kernel
    assert runtime._sources_hash(tmp_path) in seen
    for edit in (
        lambda: (tmp_path / "gpu/vec.py").write_text("x = 2\n"),
        lambda: (tmp_path / "ops/gelu.py").write_text("x = 2\n"),
        lambda: (tmp_path / "gpu/ptx.py").write_text(""),
        lambda: (tmp_path / "ops/gelu.py").rename(tmp_path / "ops/relu.py"),
    ):
        edit()
        new = runtime._sources_hash(tmp_path)
        assert new not in seen
        seen.add(new)


def test_old_kernel_caches_are_removed(numba_config, tmp_path):
    for age in range(12):
        old = tmp_path / "kernels" / f"old{age}"
        old.mkdir(parents=True)
        (old / "kernel.nbc").touch()
        os.utime(old, (age + 1, age + 1))
    current = runtime.configure.__wrapped__()
    left = {path.name for path in (tmp_path / "kernels").iterdir()}
    assert left == {current.name, *(f"old{age}" for age in range(5, 12))}


def test_the_kernel_cache_in_use_is_not_an_old_one(numba_config, tmp_path):
    current = runtime.configure.__wrapped__()
    os.utime(current, (1, 1))
    for age in range(12):
        old = tmp_path / "kernels" / f"old{age}"
        old.mkdir()
        os.utime(old, (age + 2, age + 2))
    numba_config.CACHE_DIR = ""
    assert runtime.configure.__wrapped__() == current
    assert current.is_dir()


def test_another_process_may_clean_up_too(numba_config, monkeypatch, tmp_path):
    for name in ("gone", "kept"):
        (tmp_path / "kernels" / name).mkdir(parents=True)
    listed = Path.iterdir

    def iterdir(folder):
        paths = list(listed(folder))
        shutil.rmtree(tmp_path / "kernels/gone", ignore_errors=True)
        return paths

    monkeypatch.setattr(Path, "iterdir", iterdir)
    current = runtime.configure.__wrapped__()
    assert {path.name for path in listed(tmp_path / "kernels")} == {current.name, "kept"}


# --- on the GPU ---


@pytest.mark.gpu
def test_gpu_info_on_the_gpu():
    info = runtime.gpu_info()
    assert info.compute_capability >= runtime.MIN_COMPUTE_CAPABILITY
    assert 0 < info.free_memory <= info.total_memory
    assert info.multiprocessors > 0
    report = runtime.report()
    assert info.name in report
    assert "can use CUDA         yes" in report
    assert "unknown" not in report


@pytest.mark.gpu
def test_dropped_arrays_are_freed_before_free_memory_is_measured():
    device = select_device("cuda")[0]
    cycle = [device.zeros(1 << 20)]
    cycle.append(cycle)
    array = weakref.ref(cycle[0])
    pending = cuda.current_context().memory_manager.deallocations
    del cycle
    with cuda.defer_cleanup():
        device.zeros(1 << 20)
        assert len(pending) > 0
    assert device.free_memory() > 0
    assert array() is None
    assert len(pending) == 0
