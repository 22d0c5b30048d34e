"""The whole model: its gradients against finite differences, its kernels against its references."""

import threading

import numpy as np
import pytest
from check import relative_error
from device_fixtures import on_device
from models import TINY, loss_and_gradients, make_model, random_batch, scaled_parameters

from numbagpt.config import GPT2Config
from numbagpt.device import HostDevice, select_device
from numbagpt.errors import UserError
from numbagpt.gpt2 import GPT2
from numbagpt.state import pack_batch

BATCH = pack_batch(*random_batch(TINY, 2, 37, 5))


@pytest.fixture(scope="module")
def oracle() -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of TINY in float64."""
    return loss_and_gradients(make_model(TINY, 2, 37, HostDevice("cpu", np.float64)), BATCH)


def loss_of(model: GPT2, batch: np.ndarray) -> float:
    model.device.clear(model.mean_loss)
    model.set_batch(batch)
    model.forward(with_gradient=False)
    return float(model.device.to_host(model.mean_loss)[0])


@pytest.mark.parametrize("name", scaled_parameters(TINY, 1))
def test_gradient_is_the_slope_of_the_loss(oracle: tuple, name: str) -> None:
    model = make_model(TINY, 2, 37, HostDevice("cpu", np.float64))
    tensor, gradient = model.params[name], oracle[1][name]
    rng = np.random.default_rng(7)
    direction = rng.normal(size=tensor.shape)
    if name == "wte":
        direction[TINY.vocab_size :] = 0
    direction /= np.linalg.norm(direction)
    step = 1e-4
    tensor += step * direction
    up = loss_of(model, BATCH)
    tensor -= 2 * step * direction
    down = loss_of(model, BATCH)
    np.testing.assert_allclose((gradient * direction).sum(), (up - down) / (2 * step), rtol=1e-5)


@pytest.mark.parametrize("place", ["cpu", "sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_loss_and_gradients_match_float64(oracle: tuple, place: str) -> None:
    model = make_model(TINY, 2, 37, select_device(place)[0])
    loss, gradients = loss_and_gradients(model, BATCH)
    assert abs(loss - oracle[0]) < 1e-5 * oracle[0]
    errors = {name: relative_error(gradients[name], oracle[1][name]) for name in gradients}
    assert {name: error for name, error in errors.items() if error > 1e-5} == {}


@pytest.mark.parametrize("place", ["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_transposes_for_the_weights_gradients_change_nothing(oracle: tuple, place: str) -> None:
    model = make_model(TINY, 2, 37, select_device(place)[0])
    model.transpose_pays = True
    loss, gradients = loss_and_gradients(model, BATCH)
    assert abs(loss - oracle[0]) < 1e-5 * oracle[0]
    errors = {name: relative_error(gradients[name], oracle[1][name]) for name in gradients}
    assert {name: error for name, error in errors.items() if error > 1e-5} == {}


@pytest.mark.parametrize("T", [1, 37])
def test_matches_pytorch(T: int) -> None:
    torch = pytest.importorskip("torch")
    from peer import pytorch_loss_and_gradients

    inputs, targets = random_batch(TINY, 2, T, 11)
    parameters = scaled_parameters(TINY, 1)
    expected_loss, expected = pytorch_loss_and_gradients(
        TINY, parameters, inputs, targets, torch.float64, "cpu"
    )
    model = make_model(TINY, 2, T, HostDevice("cpu", np.float64))
    loss, gradients = loss_and_gradients(model, pack_batch(inputs, targets))
    assert abs(loss - expected_loss) < 1e-10
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected[name]) < 1e-9, name


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (pack_batch(*random_batch(TINY, 1, 37, 5)), r"\(149,\) int32"),
        (pack_batch(*random_batch(TINY, 3, 37, 5)), r"\(445,\) int32"),
        (BATCH.astype(np.int64), r"\(297,\) int64"),
        (random_batch(TINY, 2, 37, 5)[0], r"\(2, 37\) int32"),
    ],
)
def test_a_batch_that_is_not_the_models_is_refused(batch: np.ndarray, found: str) -> None:
    """The copy to a GPU takes as many bytes as the batch has."""
    with pytest.raises(ValueError, match=rf"{found}; expected \(297,\) int32: .* B=2 by T=37"):
        make_model(TINY, 2, 37).set_batch(batch)


def test_padded_vocabulary_gets_no_gradient(oracle: tuple) -> None:
    assert not oracle[1]["wte"][TINY.vocab_size :].any()


def test_gradients_of_two_batches_add_up(oracle: tuple) -> None:
    model = make_model(TINY, 2, 37, HostDevice("cpu", np.float64))
    other = pack_batch(*random_batch(TINY, 2, 37, 6))
    expected = loss_and_gradients(model, other)[1]
    model.set_batch(BATCH)
    model.forward()
    model.backward()
    for name, gradient in model.gradients().items():
        np.testing.assert_allclose(gradient, expected[name] + oracle[1][name], atol=1e-12)


def test_poisoned_buffers_change_nothing() -> None:
    """Whatever a buffer held before, only what the batch determines comes out."""
    model = make_model(TINY, 2, 37)
    expected = loss_and_gradients(model, BATCH)
    keep = np.triu_indices(37, 1)
    for tensors in (model.acts, model.dacts):
        tensors.memory.fill(0xFF)  # every float and every bf16 of these bytes is NaN
    for square in (*(layer.att for layer in model.acts.layers), model.dacts.preatt):
        square[..., keep[0], keep[1]] = 0
    loss, gradients = loss_and_gradients(model, BATCH)
    assert loss == expected[0]
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, expected[1][name], err_msg=name)


def test_next_token_logits_are_those_of_the_whole_sequence() -> None:
    training = make_model(TINY, 1, 37)
    inputs, targets = random_batch(TINY, 1, 37, 3)
    training.set_batch(pack_batch(inputs, targets))
    expected = training.logits()[0]
    inference = make_model(TINY, 1, 64, training=False)
    tokens = inputs[0].tolist()
    for n in (1, 2, 20, 37):
        for model in (inference, training):
            logits = model.next_token_logits(tokens[:n])
            assert logits.shape == (TINY.vocab_size,)
            np.testing.assert_allclose(logits, expected[n - 1], rtol=1e-4, atol=1e-5)


def test_sampling_between_steps_leaves_training_as_it_was() -> None:
    model = make_model(TINY, 2, 37)
    expected = loss_and_gradients(model, BATCH)
    model.next_token_logits([1, 2, 3])
    loss, gradients = loss_and_gradients(model, BATCH)
    assert loss == expected[0]
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, expected[1][name], err_msg=name)


@on_device
def test_another_thread_may_sample(device) -> None:
    model = make_model(TINY, 1, 16, device(), training=False)
    expected = [model.next_token_logits([1, 2, 3]).tolist() for _ in range(2)]
    found = []

    def sample() -> None:
        found.extend(model.next_token_logits([1, 2, 3]).tolist() for _ in range(2))

    thread = threading.Thread(target=sample)
    thread.start()
    thread.join()
    assert found == expected


def test_an_interrupted_change_of_the_batch_shape_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under the simulator, whose kernels leave the upper triangles of attention as they are."""
    model = make_model(TINY, 2, 5, HostDevice("sim"), training=False)
    expected = model.next_token_logits([1, 2, 3])
    model.set_batch(pack_batch(*random_batch(TINY, 2, 5, 5)))
    model.forward(with_gradient=False)

    def interrupted(array: np.ndarray) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.device, "clear", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.next_token_logits([1, 2, 3])
    np.testing.assert_array_equal(model.next_token_logits([1, 2, 3]), expected)


@pytest.mark.parametrize(
    ("tokens", "found"), [([], "none"), ([1, 91], "1 to 91"), ([5, -1], "-1 to 5")]
)
def test_what_follows_tokens_that_the_model_does_not_know_is_not_told(
    tokens: list[int], found: str
) -> None:
    model = make_model(TINY, 1, 16, training=False)
    with pytest.raises(ValueError, match=f"token ids are {found}; expected 0 to 90"):
        model.next_token_logits(tokens)


def test_context_keeps_the_last_tokens() -> None:
    model = make_model(TINY, 1, 16, training=False)
    tokens = random_batch(TINY, 1, 40, 3)[0][0].tolist()
    np.testing.assert_array_equal(
        model.next_token_logits(tokens), model.next_token_logits(tokens[-16:])
    )


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda tensors: tensors.pop("lnfw"), KeyError, "lnfw"),
        (
            lambda tensors: tensors.update(wpe=tensors["wpe"][:32]),
            ValueError,
            r"wpe has shape \(32, 36\), expected \(64, 36\)",
        ),
    ],
)
def test_parameters_that_do_not_fit_change_nothing(damage, error: type, message: str) -> None:
    model = make_model(TINY, 1, 16, training=False)
    before, others = model.parameters(), scaled_parameters(TINY, 2)
    damage(others)
    with pytest.raises(error, match=message):
        model.load_parameters(others)
    for name, values in model.parameters().items():
        np.testing.assert_array_equal(values, before[name], err_msg=name)


def test_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(UserError, match="longest context is 64"):
        GPT2(TINY, HostDevice("cpu"), 1, 65)


def test_too_little_memory_names_the_largest_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    device = HostDevice("cpu")
    config = GPT2Config(max_seq_len=64, vocab_size=91, num_layers=2, num_heads=3, channels=36)
    fits = GPT2(config, device, 5, 64).plan.total
    fits_recomputing = GPT2(config, device, 1, 64, recompute=2).plan.total
    monkeypatch.setattr(device, "free_memory", lambda: fits)
    with pytest.raises(UserError, match="largest batch size that fits is 5"):
        GPT2(config, device, 8, 64)
    monkeypatch.setattr(device, "free_memory", lambda: 1000)
    with pytest.raises(UserError, match="not even B=1 fits; shorten the sequence or choose a smal"):
        GPT2(config, device, 8, 64)
    monkeypatch.setattr(device, "free_memory", lambda: fits_recomputing)
    with pytest.raises(UserError, match="not even B=1 fits; use --recompute 2, shorten the seq"):
        GPT2(config, device, 8, 64)


def test_too_little_memory_to_sample_is_told_what_helps_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B and T are not for the user to choose."""
    device = HostDevice("cpu")
    monkeypatch.setattr(device, "free_memory", lambda: 1000)
    with pytest.raises(UserError) as error:
        GPT2(TINY, device, 1, 64, training=False)
    assert str(error.value) == (
        "B=1, T=64 needs 0 MiB and 0 MiB are free: choose a smaller model, or end what else takes "
        "memory"
    )
