"""The training step against a textbook AdamW in float64, and what must hold from step to step."""

from collections.abc import Iterator

import numpy as np
import pytest
from device_fixtures import on_device
from models import TINY, loss_and_gradients, make_model, packed_batches

from numbagpt.device import HostDevice, select_device
from numbagpt.gpt2 import GPT2
from numbagpt.loader import Prefetcher, TokenLoader
from numbagpt.shards import write_shard
from numbagpt.state import pack_batch
from numbagpt.tensors import DECAYED
from numbagpt.training import StepResult, Trainer

B, T = 2, 16


def train(model: GPT2, batches: list[np.ndarray], steps: int, **options) -> list[StepResult]:
    """Run optimizer steps with the loop the program uses: results one step late."""
    accumulation = options.get("accumulation_steps", 1)
    trainer = Trainer(model, **options)
    results = []
    for step in range(steps):
        start = step * accumulation
        trainer.step(batches[start : start + accumulation], 1e-3)
        results += trainer.read(in_flight=1)
    return results + list(trainer.read())


def textbook_adamw(batches, steps, weight_decay, grad_clip, lr=1e-3, b1=0.9, b2=0.95, eps=1e-8):
    """Losses, norms and final parameters of AdamW with clipping, all in float64."""
    model = make_model(TINY, B, T, HostDevice("cpu", np.float64))
    p = {name: values.copy() for name, values in model.parameters().items()}
    m = {name: np.zeros_like(values) for name, values in p.items()}
    v = {name: np.zeros_like(values) for name, values in p.items()}
    results = []
    for t in range(1, steps + 1):
        for name, values in p.items():
            model.params[name][...] = values
        loss, g = loss_and_gradients(model, batches[t - 1])
        norm = np.sqrt(sum((gradient**2).sum() for gradient in g.values()))
        results.append((loss, norm))
        for name in p:
            gradient = g[name] * min(1.0, grad_clip / norm)
            m[name] = b1 * m[name] + (1 - b1) * gradient
            v[name] = b2 * v[name] + (1 - b2) * gradient**2
            step = (m[name] / (1 - b1**t)) / (np.sqrt(v[name] / (1 - b2**t)) + eps)
            decay = weight_decay if name in DECAYED else 0.0
            p[name] -= lr * (step + decay * p[name])
    return results, p


@on_device
def test_steps_are_adamw_with_clipping(device) -> None:
    batches = packed_batches(TINY, B, T, range(4))
    model = make_model(TINY, B, T, device())
    results = train(model, batches, 4, weight_decay=0.1, grad_clip=0.5)
    expected, parameters = textbook_adamw(batches, 4, 0.1, 0.5)
    np.testing.assert_allclose([(r.loss, r.grad_norm) for r in results], expected, rtol=2e-5)
    for name, values in model.parameters().items():
        # a step is about lr however small the gradient, so compare with the distance travelled
        assert np.abs(values - parameters[name]).max() < 0.02 * 4e-3, name


@on_device
def test_every_parameter_moves(device) -> None:
    model = make_model(TINY, B, T, device())
    before = model.parameters()
    train(model, packed_batches(TINY, B, T, range(1)), 1)
    for name, values in model.parameters().items():
        moved = values != before[name]
        used = TINY.vocab_size if name == "wte" else T if name == "wpe" else None
        # key biases have no gradient: they add the same number to every score of a query
        assert moved[:used].mean() > (0.6 if name == "qkvb" else 0.99), name
        assert not moved[used:].any() or used is None, name


@on_device
def test_a_rerun_gives_the_same_bits(device) -> None:
    batches = packed_batches(TINY, B, T, range(4))
    runs = [train(make_model(TINY, B, T, device()), batches, 4) for _ in range(2)]
    assert runs[0] == runs[1]


@on_device
def test_accumulating_equals_one_large_batch(device) -> None:
    large = packed_batches(TINY, 2 * B, T, range(2))
    n = B * T
    small = [
        row
        for batch in large
        for row in (
            _packed(batch[:n], batch[2 * n : 3 * n]),
            _packed(batch[n : 2 * n], batch[3 * n : 4 * n]),
        )
    ]
    one = train(make_model(TINY, 2 * B, T, device()), large, 2)
    two = train(make_model(TINY, B, T, device()), small, 2, accumulation_steps=2)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose((a.loss, a.grad_norm), (b.loss, b.grad_norm), rtol=1e-5)


def _packed(inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return pack_batch(inputs.reshape(B, T), targets.reshape(B, T))


@on_device
def test_evaluate_is_the_mean_loss_and_changes_nothing(device) -> None:
    model = make_model(TINY, B, T, device())
    trainer = Trainer(model)
    before = model.parameters()
    batches = packed_batches(TINY, B, T, range(3))
    loss = trainer.evaluate(batches)
    each = [loss_and_gradients(make_model(TINY, B, T), batch)[0] for batch in batches]
    np.testing.assert_allclose(loss, np.mean(each), rtol=1e-5)
    for name, values in model.parameters().items():
        np.testing.assert_array_equal(values, before[name])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, on the CPU
@on_device
def test_a_step_that_is_not_finite_changes_no_parameter(device) -> None:
    model = make_model(TINY, B, T, device())
    parameters = model.parameters()
    parameters["lnfw"][0] = np.inf
    model.load_parameters(parameters)
    (result,) = train(model, packed_batches(TINY, B, T, range(1)), 1)
    assert not np.isfinite(result.grad_norm)
    for name, values in model.parameters().items():
        np.testing.assert_array_equal(values, parameters[name], err_msg=name)


@on_device
def test_a_second_trainer_of_a_model_starts_afresh(device) -> None:
    """As one of a new model with the same parameters does, graphs of the first or not."""
    batches = packed_batches(TINY, B, T, range(8))
    model, other = (make_model(TINY, B, T, device()) for _ in range(2))
    train(model, batches, 4)
    other.load_parameters(model.parameters())
    assert train(model, batches[4:], 4) == train(other, batches[4:], 4)
    for name, values in other.parameters().items():
        np.testing.assert_array_equal(model.parameters()[name], values, err_msg=name)


@on_device
def test_a_trainer_of_a_model_that_has_a_newer_one_is_refused(device) -> None:
    batches = packed_batches(TINY, B, T, range(2))
    model = make_model(TINY, B, T, device())
    first = Trainer(model)
    first.step(batches[:1], 1e-3)
    second = Trainer(model)
    before = model.parameters()
    for use in (lambda: first.step(batches[1:], 1e-3), lambda: first.evaluate(batches)):
        with pytest.raises(RuntimeError, match="the model has a newer Trainer"):
            use()
    for name, values in model.parameters().items():
        np.testing.assert_array_equal(values, before[name], err_msg=name)
    (result,) = first.read()  # what it did before can still be read
    np.testing.assert_allclose(
        result.loss, loss_and_gradients(make_model(TINY, B, T), batches[0])[0], rtol=1e-5
    )
    np.testing.assert_allclose(
        second.evaluate(batches[1:]), loss_and_gradients(model, batches[1])[0], rtol=1e-5
    )


def test_what_a_trainer_cannot_work_with_is_refused() -> None:
    with pytest.raises(ValueError, match="made with training=False"):
        Trainer(make_model(TINY, B, T, training=False))
    trainer = Trainer(make_model(TINY, B, T))
    batches = iter(packed_batches(TINY, B, T, range(2)))
    trainer.evaluate(batches)
    with pytest.raises(ValueError, match=r"evaluate: no batches; .* is an iterator used up"):
        trainer.evaluate(batches)


@pytest.mark.parametrize("bad", [TINY.vocab_size, -100])
@pytest.mark.parametrize("which", [0, 1])
def test_tokens_that_the_model_does_not_know_are_refused(which: int, bad: int) -> None:
    """The data may be those of another model, or mark what is to be left out."""
    batch = np.zeros((2, B, T), np.int32)
    batch[which, 1, 3] = bad
    with pytest.raises(ValueError, match=rf"token ids are .*{bad}.*; expected 0 to 90"):
        Trainer(make_model(TINY, B, T)).pack(*batch)


def test_a_third_step_in_flight_is_refused() -> None:
    trainer = Trainer(make_model(TINY, B, T))
    batches = packed_batches(TINY, B, T, range(1))
    trainer.step(batches, 1e-3)
    trainer.step(batches, 1e-3)
    with pytest.raises(RuntimeError, match="two steps are in flight"):
        trainer.step(batches, 1e-3)


@on_device
def test_a_step_whose_batches_end_early_was_never_taken(device) -> None:
    batches = packed_batches(TINY, B, T, range(10))

    def interrupted(batches: list[np.ndarray]) -> Iterator[np.ndarray]:
        yield from batches
        raise KeyboardInterrupt

    def results_and_parameters(give_up: bool) -> tuple:
        model = make_model(TINY, B, T, device())
        trainer = Trainer(model, accumulation_steps=2)
        results = []
        for step in range(5):
            if give_up:  # with one step in flight, in the first, recorded and replayed steps
                before = model.parameters()
                with pytest.raises(KeyboardInterrupt):
                    trainer.step(interrupted(batches[7:8]), 1e-3)
                for name, values in model.parameters().items():
                    np.testing.assert_array_equal(values, before[name], err_msg=name)
                assert trainer.steps == step
            trainer.step(batches[2 * step : 2 * step + 2], 1e-3)
            results += trainer.read(in_flight=1)
        return results + list(trainer.read()), model.parameters()

    whole, parameters = results_and_parameters(give_up=False)
    with_given_up, parameters_after = results_and_parameters(give_up=True)
    assert with_given_up == whole
    for name, values in parameters.items():
        np.testing.assert_array_equal(parameters_after[name], values, err_msg=name)


class InterruptedDevice(HostDevice):
    """The wait for a step's end, or the update of one tensor, is interrupted where a test says."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.interrupted = ""
        self.ops.adamw_update = self.interruptible("update", self.ops.adamw_update)

    def interruptible(self, name: str, function):
        def call(*arguments, **options):
            if self.interrupted == name:
                self.interrupted = ""
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return call

    def marker(self):
        return (lambda: None), self.interruptible("wait", lambda: None)


def test_an_interrupted_update_is_no_step() -> None:
    batches = packed_batches(TINY, B, T, range(3))
    trainer = Trainer(make_model(TINY, B, T, InterruptedDevice()))
    expected = train(make_model(TINY, B, T), batches, 3)
    trainer.step(batches[:1], 1e-3)
    trainer.model.device.interrupted = "update"  # of the first tensor: nothing is new yet
    with pytest.raises(KeyboardInterrupt):
        trainer.step(batches[1:2], 1e-3)
    assert trainer.steps == 1
    results = []
    for i in (1, 2):
        trainer.step(batches[i : i + 1], 1e-3)
        results += trainer.read(in_flight=1)
    assert results + list(trainer.read()) == expected
    assert trainer.steps == 3


def test_an_interrupted_read_loses_no_result() -> None:
    batches = packed_batches(TINY, B, T, range(2))
    trainer = Trainer(make_model(TINY, B, T, InterruptedDevice()))
    for batch in batches:
        trainer.step([batch], 1e-3)
    trainer.model.device.interrupted = "wait"
    with pytest.raises(KeyboardInterrupt):
        list(trainer.read())
    assert list(trainer.read()) == train(make_model(TINY, B, T), batches, 2)


def loader_of_random_tokens(folder) -> TokenLoader:
    path = folder / "tokens.bin"
    if not path.exists():
        write_shard(path, np.random.default_rng(3).integers(0, TINY.vocab_size, 7 * B * T + 5))
    return TokenLoader(str(path), B, T, TINY.vocab_size)


def train_from_a_thread(trainer: Trainer, folder, steps: int, accumulation: int) -> list:
    """Results of steps whose batches a thread packs ahead, with a validation between them."""
    results = []
    with Prefetcher(loader_of_random_tokens(folder), trainer.pack) as prefetcher:
        for step in range(steps):
            if step == steps // 2:
                results += trainer.read()
                loader = loader_of_random_tokens(folder)
                results.append(
                    trainer.evaluate(trainer.pack(*loader.next_batch()) for _ in range(3))
                )
            trainer.step((prefetcher.next_batch() for _ in range(accumulation)), 1e-3)
            results += trainer.read(in_flight=1)
    return results + list(trainer.read())


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_buffers_used_again_change_no_bit(tmp_path, place: str, accumulation: int) -> None:
    steps = 6
    trainers = [
        Trainer(make_model(TINY, B, T, select_device(place)[0]), accumulation) for _ in range(2)
    ]
    trainers[1].pack = pack_batch  # new arrays
    pooled, fresh = (train_from_a_thread(t, tmp_path, steps, accumulation) for t in trainers)
    assert pooled == fresh
    assert len(pooled) == steps + 1


class LateDevice(HostDevice):
    """Looks again at where batches were uploaded from, when a GPU may only just have read them."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.uploads: list[tuple[np.ndarray, np.ndarray]] = []
        self.done = 0

    def upload(self, target: np.ndarray, source: np.ndarray) -> None:
        super().upload(target, source)
        if target.dtype == np.int32:
            # a view refers to the memory, not to the array, and so hides nothing from the pool
            self.uploads.append((source.view(), source.copy()))

    def marker(self):
        marked = []
        return (lambda: marked.append(len(self.uploads))), (lambda: self.finish(marked.pop()))

    def synchronize(self) -> None:
        self.finish(len(self.uploads))

    def to_host(self, array: np.ndarray) -> np.ndarray:
        self.synchronize()
        return super().to_host(array)

    def finish(self, count: int) -> None:
        """Everything up to the upload of this number is done."""
        for buffer, uploaded in self.uploads[self.done : count]:
            np.testing.assert_array_equal(buffer, uploaded)
        self.done = max(self.done, count)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_no_buffer_is_used_again_before_it_was_copied(tmp_path, accumulation: int) -> None:
    device, steps = LateDevice(), 12
    trainer = Trainer(make_model(TINY, B, T, device), accumulation)
    train_from_a_thread(trainer, tmp_path, steps, accumulation)
    assert device.done == len(device.uploads) == steps * accumulation + 3
    assert len({buffer.ctypes.data for buffer, _ in device.uploads}) <= 2 * accumulation + 6


def test_within_a_step_the_host_is_two_batches_ahead_at_most() -> None:
    device = LateDevice()
    trainer = Trainer(make_model(TINY, B, T, device), accumulation_steps=6)
    ahead = []

    def batches() -> Iterator[np.ndarray]:
        for batch in packed_batches(TINY, B, T, range(6)):
            ahead.append(len(device.uploads) - device.done)
            yield batch

    trainer.step(batches(), 1e-3)
    assert ahead == [0, 1, 2, 2, 2, 2]
