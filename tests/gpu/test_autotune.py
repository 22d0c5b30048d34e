"""Which algorithm a product runs on: chosen once by timing, then always the same."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cuda.bindings import driver
from numba import cuda

from numbagpt.gpu import autotune, blas, cublaslt, graph, recording
from numbagpt.gpu.choices import Choices
from tests.gpu.matmul_case import Case

pytest.importorskip("nvmath")
from tests.gpu import fake_cublaslt
from tests.gpu.fake_cublaslt import host_array

SHAPE = (0, 5, 8, 3)
GELU = {"gelu": True, "bias": True}


def to_host(array):
    return array.array


@pytest.fixture(autouse=True)
def _as_at_the_start(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBAGPT_CACHE", str(tmp_path))
    cublaslt.plan_for.cache_clear()
    yield
    blas.set_precision("fp32")
    blas.set_autotune(True)
    cublaslt.plan_for.cache_clear()


@pytest.fixture
def process(monkeypatch, tmp_path):
    """Enter `process(seconds)` to be in a new process, with algorithms that take these times."""

    class Process:
        def __init__(self, seconds, **fields):
            self.context = fake_cublaslt.library(monkeypatch, tmp_path)
            self.fields = fields | {"seconds": list(seconds)}

        def __enter__(self):
            library = self.context.__enter__()
            vars(library.lt).update(self.fields)
            return library.lt

        def __exit__(self, *exception):
            return self.context.__exit__(*exception)

    return Process


def kept(tmp_path) -> dict[str, str]:
    files = list((tmp_path / "choices").glob("*"))
    assert len(files) == 1
    return json.loads(files[0].read_bytes())


def algorithms(lt) -> list[int]:
    return [algorithm for algorithm, _ in lt.runs]


def check(options=None) -> None:
    case = Case(SHAPE, options=options)
    assert case.error(case.run(host_array, to_host)) <= 1e-6


@pytest.mark.parametrize(
    ("seconds", "best"), [([3, 2, 1], 2), ([1, 2, 3], 0), ([2, 1, 1.05], 1), ([2, 1, 1], 1)]
)
def test_the_fastest_is_taken_and_taken_again(process, tmp_path, seconds, best):
    with process(seconds) as lt:
        check()
        assert set(algorithms(lt)) == {0, 1, 2}
        check()
        assert algorithms(lt)[-2:] == [best, best]
    (name, chosen), *others = kept(tmp_path).items()
    assert not others
    assert name.startswith("out (5, 8) float32 = a (5, 3) float32 @ b (3, 8) float32, fp32")
    assert bytes.fromhex(chosen) == np.full(8, 1000 + best, np.uint64).tobytes()
    # Another process would choose otherwise by its own measure, but times nothing.
    with process(seconds[::-1]) as lt:
        check()
        assert algorithms(lt) == [best]
        assert not lt.preferences


def test_each_kind_of_product_has_its_own(process, tmp_path):
    kinds = [{}, {"bias": True}, {"gelu": True}, GELU, {"beta": 1.0}, {"add": True}]
    with process([2, 1]) as lt:
        for options in kinds:
            before = len(lt.runs)
            check(options)
            assert set(algorithms(lt)[before:]) == {0, 1}
    assert len(kept(tmp_path)) == len(kinds)


def test_the_slow_drop_out(process):
    with process([1e-3, 1.05e-3, 2e-3]) as lt:
        check()
    counts = np.bincount(algorithms(lt))
    # Each has a first run and one in the first round; the first is timed once more, and it wins.
    assert counts.tolist() == [1 + 1 + 5 + 1, 1 + 5, 1 + 1]


def test_samples_fill_some_time_and_all_of_them_no_more_than_some(process):
    with process([1e-5, 1e-5]) as lt:
        check()
        assert 2 * 16 * 5 < len(lt.runs) < 2 * 16 * 5 + 8
    with process([1.0, 1.0, 1.0]) as lt:
        check({"bias": True})
        assert len(lt.runs) == 3 + 1 + 3 + 1


def test_an_outlier_does_not_decide(monkeypatch):
    samples = {"a": iter([1e-3, 1.1e-3, 1.1e-3, 0.5e-3, 1.1e-3, 1.1e-3]), "b": iter([1e-3] * 6)}
    monkeypatch.setattr(autotune.graph, "capture", lambda fn: SimpleNamespace(launch=fn))
    monkeypatch.setattr(autotune, "elapsed_seconds", lambda fn: next(samples[last(fn)]))

    def last(launch):
        return launch if isinstance(launch, str) else launch.args[0]

    assert autotune.fastest(["a", "b"]) == 1


def test_a_refused_candidate_is_passed_over(process):
    with process([3, 1, 2], refused={1}) as lt:
        check()
        assert algorithms(lt)[-1] == 2
    with process([3, 2], refused={0, 1}), pytest.raises(blas.BlasError, match="not supported"):
        check({"bias": True})


@pytest.mark.parametrize("options", [{"beta": 1.0}, {"beta": -2.0, "alpha": 0.5, "bias": True}])
def test_timing_does_not_add_to_out(process, options):
    with process([2, 1]) as lt:
        case = Case(SHAPE, options=options)
        run, out, _ = case.on(host_array)
        run()
        assert case.error(out.array) <= 1e-6
        address = out.device_ctypes_pointer.value
        assert [d == address for _, d in lt.runs] == [False] * (len(lt.runs) - 1) + [True]
        assert len(lt.runs) > 2


def test_timing_an_added_array_needs_no_scratch(process):
    def scratch(nbytes):
        raise MemoryError

    with process([2, 1]) as lt:
        lt.patch.setattr(autotune, "_scratch", scratch)
        case = Case(SHAPE, options={"add": True, "bias": True})
        run, out, _ = case.on(host_array)
        run()
        assert case.error(out.array) <= 1e-6
        assert {d for _, d in lt.runs} == {out.device_ctypes_pointer.value}
        assert algorithms(lt)[-1] == 1


def test_no_memory_to_time_in(process, tmp_path):
    def allocate(nbytes):
        assert nbytes == 5 * 8 * 4
        return driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None

    scratch = autotune._scratch
    with process([2, 1]) as lt:
        lt.patch.setattr(autotune, "_scratch", scratch)
        lt.patch.setattr(driver, "cuMemAlloc", allocate)
        with pytest.warns(RuntimeWarning, match=r"not timed: out \(5, 8\).*OUT_OF_MEMORY"):
            check({"beta": 1.0})
        assert algorithms(lt) == [0]
    assert not (tmp_path / "choices").exists()


@pytest.mark.parametrize("refused", [set(), {0}], ids=str)
def test_no_memory_for_a_graph(process, tmp_path, refused):
    """The first is taken that was not refused."""

    def capture(fn):
        raise recording.GraphError("CUDA_ERROR_OUT_OF_MEMORY")

    with process([2, 1, 3], refused=refused) as lt:
        lt.patch.setattr(autotune.graph, "capture", capture)
        with pytest.warns(RuntimeWarning, match="not timed.*OUT_OF_MEMORY"):
            check()
        assert algorithms(lt)[-1] == len(refused)
    assert not (tmp_path / "choices").exists()


def test_nothing_is_timed_in_a_capture(process):
    def start_capture(lt):
        lt.patch.setattr(autotune, "_capturing", lambda: True)

    with process([2, 1]) as lt:
        start_capture(lt)
        with pytest.raises(recording.GraphError, match=r"out \(5, 8\).* is not chosen yet"):
            check()
        assert not lt.runs
    with process([2, 1]) as lt:
        check()
        start_capture(lt)
        check()
    with process([2, 1]) as lt:  # what is known from an earlier run may be captured at once
        start_capture(lt)
        check()
        assert algorithms(lt) == [1]


def test_switched_off(process, tmp_path):
    with process([2, 1]) as lt:
        blas.set_autotune(False)
        check()
        assert algorithms(lt) == [0]
        assert not (tmp_path / "choices").exists()
        blas.set_autotune(True)
        check()
        assert algorithms(lt)[-1] == 1
        blas.set_autotune(False)
        check()
        assert algorithms(lt)[-1] == 0


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff", '{"NAME": 5}', '{"NAME": "zz"}'])
def test_a_file_that_makes_no_sense_is_replaced(process, tmp_path, content):
    with process([2, 1]):
        check()
    (name,) = expected = kept(tmp_path)
    (path,) = (tmp_path / "choices").glob("*")
    path.write_bytes(content.replace("NAME", name).encode("latin-1"))
    with process([2, 1]) as lt:
        check()
        assert algorithms(lt)[-1] == 1
    assert kept(tmp_path) == expected


@pytest.mark.parametrize(
    ("chosen", "fields"),
    [
        ("e903", {}),
        (None, {"unknown": {1}}),
        (None, {"unknown": {1}, "refused": {1}}),
    ],
    ids=["too short", "refused by the check", "refused altogether"],
)
def test_an_algorithm_that_cublaslt_does_not_know_is_replaced(process, tmp_path, chosen, fields):
    with process([2, 1]):
        check()
    (path,) = (tmp_path / "choices").glob("*")
    if chosen is not None:
        path.write_text(json.dumps(dict.fromkeys(kept(tmp_path), chosen)))
    with process([1, 2], **fields) as lt:
        check()
        assert algorithms(lt)[-1] == 0
    (chosen,) = kept(tmp_path).values()
    assert bytes.fromhex(chosen) == np.full(8, 1000, np.uint64).tobytes()


def test_an_algorithm_that_needs_more_workspace_is_replaced(process, tmp_path):
    with process([2, 1]):
        check()
    with process([1, 2], workspace=1 << 30) as lt:
        check()
        assert algorithms(lt)[-1] == 0


def test_a_cache_that_cannot_be_written(process, tmp_path):
    with process([2, 1]) as lt:
        (tmp_path / "file").touch()
        lt.patch.setenv("NUMBAGPT_CACHE", str(tmp_path / "file"))
        with pytest.warns(RuntimeWarning, match="what was measured is not kept"):
            check()
        check()
        assert algorithms(lt)[-2:] == [1, 1]


def test_a_choice_that_finds_the_disk_full(monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    choices = Choices("x.json")
    reason = r"cannot write .*x\.json: No space left on device; .*; NUMBAGPT_CACHE names the cache"
    with pytest.warns(RuntimeWarning, match=rf"what was measured is not kept: {reason}"):
        choices.put("a", b"\x01")
    assert choices.get("a") == b"\x01"
    assert Choices("x.json").get("a") is None


def test_choices_of_two_processes_are_kept_both():
    first, second = Choices("x.json"), Choices("x.json")
    assert first.get("a") is second.get("b") is None
    first.put("a", b"\x01\xff")
    second.put("b", b"")
    assert (Choices("x.json").get("a"), Choices("x.json").get("b")) == (b"\x01\xff", b"")
    second.put("a", b"\x02")
    third = Choices("x.json")
    assert (third.get("a"), third.get("b"), third.get("c")) == (b"\x02", b"", None)
    assert Choices("y.json").get("a") is None


# --- on the GPU ---

# Forward with GELU, an input's and a weight's gradient, the head; small and odd ones too.
CASES = {
    "fc": ((0, 1024, 3072, 768), (False, True), GELU, "bfloat16"),
    "dinp": ((0, 1024, 3072, 768), (False, False), {}, "bfloat16"),
    "dweight": ((0, 768, 3072, 4096), (True, False), {"beta": 1.0}, "bfloat16", "float32"),
    "head": ((0, 512, 50304, 256), (False, True), {}, "bfloat16"),
    "tf32": ((0, 512, 768, 3072), (False, True), {"bias": True}, "float32"),
    "fcproj": ((0, 1024, 768, 3072), (False, True), {"add": True, "bias": True}, "bfloat16"),
    "odd": ((3, 37, 40, 37), (False, False), {"alpha": 0.5, "beta": -1.0}, "float32"),
}


def on_gpu(name):
    blas.set_precision("tf32")
    return Case(*CASES[name])


def tolerance(case) -> float:
    """The largest that is asked for; bfloat16 into float32 is exact but for the sum."""
    if case.a.dtype == np.float32:
        return 2e-3
    return 1e-5 if case.out.dtype == np.float32 else 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_timed_call_is_right_and_repeats_bit_for_bit_on_the_gpu(name, tmp_path):
    timed, again = on_gpu(name), on_gpu(name)
    first, second = (
        case.run(cuda.to_device, lambda array: array.copy_to_host()) for case in (timed, again)
    )
    assert timed.error(first) <= tolerance(timed)
    np.testing.assert_array_equal(first, second)
    if timed.expected_aux is not None:
        np.testing.assert_array_equal(timed.aux, again.aux)
    assert all(len(chosen) == 128 for chosen in kept(tmp_path).values())


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_replay_computes_the_same_bits_on_the_gpu(name):
    case = on_gpu(name)
    run, out, _ = case.on(cuda.to_device)
    run()
    expected = out.copy_to_host()
    captured = graph.capture(run)
    out.copy_to_device(case.out)
    captured.launch()
    np.testing.assert_array_equal(out.copy_to_host(), expected)


@pytest.mark.gpu
def test_a_first_use_in_a_capture_is_refused_on_the_gpu():
    blas.set_precision("bf16")
    # a product of no other test: the process keeps what was chosen for theirs
    case = Case((0, 776, 3072, 4096), (True, False), {"beta": 1.0}, "bfloat16", "float32")
    run, out, _ = case.on(cuda.to_device)
    cublaslt.library()  # its workspace is allocated at the first product of a process
    with pytest.raises(recording.GraphError, match="is not chosen yet; run the step once before"):
        graph.capture(run)
    run()
    assert case.error(out.copy_to_host()) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_switched_off_on_the_gpu(name, tmp_path):
    blas.set_autotune(False)
    case = on_gpu(name)
    assert case.error(case.run(cuda.to_device, lambda x: x.copy_to_host())) <= tolerance(case)
    assert not (tmp_path / "choices").exists()


PROGRAM = """
import hashlib
from numba import cuda
from numbagpt.gpu import autotune, cublaslt
from tests.gpu import test_autotune

timed, choose = [], autotune.choose
autotune.choose = lambda *arguments: timed.append(None) or choose(*arguments)
for name in test_autotune.CASES:
    result = test_autotune.on_gpu(name).run(cuda.to_device, lambda array: array.copy_to_host())
    print(name, hashlib.sha256(result.tobytes()).hexdigest())
print("timed", len(timed))
"""


@pytest.mark.gpu
def test_another_process_computes_the_same_bits_on_the_gpu(tmp_path):
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"NUMBAGPT_CACHE": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.split("timed")
        for _ in range(2)
    ]
    assert outputs[0][0] == outputs[1][0]
    assert outputs[0][0].count("\n") == len(CASES)
    timed = [int(output[1]) for output in outputs]
    assert timed[0] > 0  # not all: a product may have a single candidate
    assert timed[1] == 0
    assert len(kept(tmp_path)) == timed[0]
