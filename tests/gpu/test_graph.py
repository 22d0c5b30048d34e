"""Capture and replay: what is done when a capture fails, and graphs on the GPU."""

import contextlib
import functools
import gc
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from cuda.bindings import driver
from numba import cuda, float32, int64, void

from numbagpt.device import CudaDevice
from numbagpt.errors import UserError
from numbagpt.gpu import blas, graph, memset, recording, stream
from numbagpt.gpu.kernel import kernel

OK = driver.CUresult.CUDA_SUCCESS


class FakeDriver:
    """The graph functions of the driver; notes the order of calls, fails where told to."""

    CUresult = driver.CUresult
    CUgraphNodeType = driver.CUgraphNodeType

    def __init__(self) -> None:
        self.calls = []
        self.status = {}

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            return self.status.get(name, OK), f"result of {name}"

        return call

    # The graph is empty, so that its memsets need no replacement.

    def cuGraphGetNodes(self, *arguments):
        return OK, [], 0

    def cuGraphGetEdges(self, *arguments):
        return OK, [], [], 0


@pytest.fixture
def fake(monkeypatch):
    fake = FakeDriver()
    work = SimpleNamespace(name="work", handle=1)
    for module in (graph, memset, recording):
        monkeypatch.setattr(module, "driver", fake)
    monkeypatch.setattr(recording.cuda, "defer_cleanup", contextlib.nullcontext)
    monkeypatch.setattr(stream, "new_stream", lambda: SimpleNamespace(name="recording", handle=2))
    monkeypatch.setattr(stream, "_default", lambda: work)
    return fake


def test_capture_runs_the_step_on_its_own_stream(fake):
    seen = []
    captured = graph.capture(lambda: seen.append((stream.current().name, stream.handle())))
    assert seen == [("recording", 2)]
    assert stream.current().name == "work"
    captured.launch()
    assert fake.calls == [
        "cuStreamBeginCapture",
        "cuStreamEndCapture",
        "cuGraphInstantiate",
        "cuGraphDestroy",
        "cuGraphUpload",
        "cuGraphLaunch",
    ]


def test_the_executable_graph_is_freed_with_its_owner(fake):
    captured = graph.capture(lambda: None)
    assert "cuGraphExecDestroy" not in fake.calls
    del captured
    assert fake.calls[-1] == "cuGraphExecDestroy"


def test_a_failing_step_ends_the_capture(fake):
    def step():
        raise RuntimeError("no room")

    with pytest.raises(recording.GraphError, match=r"no room; run the step once before"):
        graph.capture(step)
    assert fake.calls == ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphDestroy"]
    assert stream.current().name == "work"


def test_an_invalidated_capture_has_no_graph_to_destroy(fake):
    fake.status["cuStreamEndCapture"] = driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    with pytest.raises(
        recording.GraphError, match=r"STREAM_CAPTURE_INVALIDATED; run the step once"
    ):
        graph.capture(lambda: None)
    assert fake.calls == ["cuStreamBeginCapture", "cuStreamEndCapture"]


@pytest.mark.parametrize("error", [UserError("bad flag"), KeyboardInterrupt()])
def test_errors_that_are_not_about_the_capture_pass_through(fake, error):
    def step():
        raise error

    with pytest.raises(type(error)) as raised:
        graph.capture(step)
    assert raised.value is error
    assert "cuStreamEndCapture" in fake.calls


def test_a_capture_inside_a_capture_is_refused(fake):
    with pytest.raises(recording.GraphError, match="in use already"):
        graph.capture(lambda: graph.capture(lambda: None))
    assert stream.current().name == "work"


@pytest.mark.parametrize("error", [RuntimeError("an algorithm is not chosen"), KeyboardInterrupt()])
def test_work_whose_capture_failed_is_run_and_captured_again(fake, error):
    """What the capture lacked is there after one more run."""
    device = CudaDevice.__new__(CudaDevice)  # without looking for a GPU
    device.use_graphs = True
    done = []

    def work():
        done.append(stream.current().name)
        if len(done) == 2:
            raise error

    replay = device.replayable(work)
    replay()
    with pytest.raises((recording.GraphError, KeyboardInterrupt)):
        replay()
    replay()
    assert "cuGraphLaunch" not in fake.calls
    for _ in range(2):
        replay()
    assert done == ["work", "recording", "work", "recording"]
    assert fake.calls.count("cuGraphLaunch") == 2


@pytest.fixture
def eager_collector():
    """Python's garbage collector, run after every few objects."""
    before = gc.get_threshold()
    gc.set_threshold(5)
    yield
    gc.set_threshold(*before)


def drop_in_a_cycle(garbage: list) -> None:
    """Leave an object to the collector, and give it reason to run."""
    cycle = [garbage.pop()]
    cycle.append(cycle)
    del cycle
    assert len([[] for _ in range(1000)]) == 1000


def test_garbage_is_collected_after_a_capture(fake, eager_collector):
    garbage = [graph.capture(lambda: None)]
    assert gc.isenabled()
    captured = graph.capture(lambda: drop_in_a_cycle(garbage))
    assert gc.isenabled()
    gc.collect()
    assert fake.calls.count("cuGraphExecDestroy") == 1
    second_end = len(fake.calls) - fake.calls[::-1].index("cuStreamEndCapture")
    assert fake.calls.index("cuGraphExecDestroy") >= second_end
    del captured


def test_a_collector_that_is_off_stays_off(fake):
    gc.disable()
    try:
        graph.capture(lambda: None)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_is_on_again_after_a_failed_capture(fake):
    with pytest.raises(recording.GraphError):
        graph.capture(lambda: 1 / 0)
    assert gc.isenabled()


def test_a_failing_launch_says_why(fake):
    captured = graph.capture(lambda: None)
    fake.status["cuGraphLaunch"] = driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(recording.GraphError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS$"):
        captured.launch()


def test_every_thread_takes_the_context_once_and_the_same_stream(monkeypatch):
    streams, attached = [], []
    monkeypatch.setattr(stream, "_shared", functools.cache(object))
    monkeypatch.setattr(stream, "_thread", threading.local())
    monkeypatch.setattr(
        stream.cuda, "current_context", lambda: attached.append(threading.get_ident())
    )

    def take_twice():
        streams.extend([stream.current(), stream.current()])

    take_twice()
    other = threading.Thread(target=take_twice)
    other.start()
    other.join()
    assert len(streams) == 4
    assert len(set(streams)) == 1
    assert attached == [threading.get_ident(), other.ident]


# --- on the GPU ---


@kernel(void(float32[::1], float32[::1], float32[::1], int64), max_threads=128)
def scaled_sum_kernel(out, inp, scale, N):
    """out[i] += scale[0] * inp[i]. One thread per element."""
    i = cuda.grid(1)
    if i < N:
        out[i] = out[i] + scale[0] * inp[i]


class Step:
    """A matmul, then a kernel that reads its result and a scalar in device memory."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        a, b = (rng.standard_normal((64, 64), np.float32) for _ in range(2))
        self.a, self.b = cuda.to_device(a), cuda.to_device(b)
        self.product = cuda.to_device(np.full((64, 64), np.nan, np.float32))
        self.total = cuda.to_device(np.zeros(64 * 64, np.float32))
        self.scale = cuda.to_device(np.ones(1, np.float32))

    def __call__(self) -> None:
        blas.matmul(self.product, self.a, self.b, transpose_b=True)
        n = self.total.size
        scaled_sum_kernel[-(-n // 128), 128](self.total, self.product, self.scale, n)

    def run(self, launch) -> np.ndarray:
        """total after three launches with three scales."""
        self.product.copy_to_device(np.full((64, 64), np.nan, np.float32))
        self.total.copy_to_device(np.zeros(64 * 64, np.float32))
        for scale in (1.0, -0.25, 3.0):
            self.scale.copy_to_device(np.full(1, scale, np.float32))
            launch()
        return self.total.copy_to_host()


@pytest.mark.gpu
def test_replays_equal_eager_runs_bit_for_bit():
    step = Step()
    eager = step.run(step)
    assert np.isfinite(eager).all()
    assert np.abs(eager).max() > 1.0
    captured = graph.capture(step)
    assert (step.total.copy_to_host() == eager).all(), "capturing must not run the step"
    np.testing.assert_array_equal(step.run(captured.launch), eager)


@pytest.mark.gpu
def test_graphs_that_are_garbage_do_not_spoil_a_capture(eager_collector):
    step = Step()
    eager = step.run(step)
    garbage = [graph.capture(step)]
    dropped = weakref.ref(garbage[0])

    def step_with_garbage():
        step()
        if garbage:
            drop_in_a_cycle(garbage)
            assert dropped() is not None

    captured = graph.capture(step_with_garbage)
    np.testing.assert_array_equal(step.run(captured.launch), eager)
    gc.collect()
    assert dropped() is None


@pytest.mark.gpu
def test_what_a_graph_cannot_hold_is_refused():
    step = Step()
    expected = step.run(step)
    host = np.zeros(4, np.float32)
    array = cuda.to_device(host)
    for forbidden in (
        lambda: cuda.device_array(1 << 20, np.float32),
        array.copy_to_host,
        stream.synchronize,
    ):

        def spoiled(forbidden=forbidden):
            step()
            forbidden()

        with pytest.raises(recording.GraphError, match="run the step once before"):
            graph.capture(spoiled)
        # The GPU is as usable as before.
        np.testing.assert_array_equal(step.run(step), expected)
    np.testing.assert_array_equal(step.run(graph.capture(step).launch), expected)


@pytest.mark.gpu
def test_numba_copies_are_in_order_with_the_stream():
    n = 1 << 24
    ones = np.ones(n, np.float32)
    out, inp, scale = (cuda.to_device(x) for x in (np.zeros(n, np.float32), ones, ones[:1]))
    for _ in range(20):
        scaled_sum_kernel[-(-n // 128), 128](out, inp, scale, n)
    assert (out.copy_to_host() == 20).all()
    out.copy_to_device(ones)
    scaled_sum_kernel[-(-n // 128), 128](out, inp, scale, n)
    assert (out.copy_to_host() == 2).all()
    stream.synchronize()
