"""The whole model in bf16 and TF32, with flash attention, against itself in float64."""

import numpy as np
import pytest
from check import relative_error
from models import loss_and_gradients, make_model, random_batch, scaled_parameters

from numbagpt.config import GPT2Config
from numbagpt.device import HostDevice, select_device
from numbagpt.errors import UserError
from numbagpt.gpt2 import GPT2
from numbagpt.modes import PRECISIONS
from numbagpt.state import best_precision, pack_batch, plan_model
from numbagpt.training import Trainer

# Heads of 16 channels: the smallest that flash attention takes.
SMALL = GPT2Config(max_seq_len=64, vocab_size=91, num_layers=2, num_heads=2, channels=32)
T = 37
BATCH = pack_batch(*random_batch(SMALL, 1, T, 5))
PLACES = [
    "sim",
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module")
def oracle() -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients in float64."""
    return loss_and_gradients(make_model(SMALL, 1, T, HostDevice("cpu", np.float64)), BATCH)


def model_on(place: str, **options) -> GPT2:
    return make_model(SMALL, 1, T, select_device(place)[0], **options)


@pytest.mark.parametrize("place", PLACES)
def test_bf16_loss_and_gradients(oracle: tuple, place: str) -> None:
    loss, gradients = loss_and_gradients(model_on(place, precision="bf16"), BATCH)
    assert abs(loss - oracle[0]) < 1e-3 * oracle[0]
    errors = {name: relative_error(gradients[name], oracle[1][name]) for name in gradients}
    assert {name: error for name, error in errors.items() if not error < 1e-2} == {}


@pytest.mark.gpu
def test_tf32_loss_and_gradients(oracle: tuple) -> None:
    loss, gradients = loss_and_gradients(model_on("cuda", precision="tf32"), BATCH)
    assert abs(loss - oracle[0]) < 1e-3 * oracle[0]
    errors = {name: relative_error(gradients[name], oracle[1][name]) for name in gradients}
    assert {name: error for name, error in errors.items() if not error < 2e-3} == {}


class PrecisionNotingDevice(HostDevice):
    """Notes the precision that is set whenever matrices are multiplied."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.seen: list[str] = []
        for name in ("matmul_forward", "matmul_backward", "matmul_gelu_forward"):
            setattr(self.ops, name, self.noting(getattr(self.ops, name)))

    def noting(self, multiply):
        def noted(*arguments, **options):
            self.seen.append(self.precision)
            multiply(*arguments, **options)

        return noted

    def check_precision(self, precision: str) -> None:
        """All are welcome."""

    def set_precision(self, precision: str) -> None:
        self.precision = precision


def test_models_of_two_precisions_each_multiply_in_their_own() -> None:
    device = PrecisionNotingDevice()
    model, other = (
        make_model(SMALL, 1, T, device, precision=precision, attention="materialized")
        for precision in ("fp32", "tf32")
    )
    model.set_batch(BATCH)
    for work in (model.forward, model.backward, lambda: model._logits(slice(0, T)), model.logits):
        other.logits()
        device.seen.clear()
        work()
        assert set(device.seen) == {"fp32"}


@pytest.mark.gpu
def test_a_model_in_tf32_leaves_one_in_fp32_as_it_is() -> None:
    exact = model_on("cuda", precision="fp32")
    loss, gradients = loss_and_gradients(exact, BATCH)
    rounded = model_on("cuda", precision="tf32", attention="materialized")
    rounded_loss, rounded_gradients = loss_and_gradients(rounded, BATCH)
    again, gradients_again = loss_and_gradients(exact, BATCH)
    assert again == loss
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradients_again[name], gradient, err_msg=name)
    assert (rounded_gradients["qkvw"] != gradients["qkvw"]).any()
    assert abs(rounded_loss - loss) < 1e-3 * loss


class TrainingRun:
    """A model that trains, validates and samples in turn, some of it as graphs on a GPU."""

    def __init__(self, place: str, precision: str, B: int, T: int, accumulation: int) -> None:
        device = select_device(place)[0]
        self.model = make_model(SMALL, B, T, device, precision=precision)
        self.trainer = Trainer(self.model, accumulation)
        batches = [pack_batch(*random_batch(SMALL, B, T, seed)) for seed in range(accumulation)]
        self.batches, self.seen = batches, []

    def turn(self) -> None:
        self.trainer.step(self.batches, 1e-3)
        self.seen.append(self.model.next_token_logits([1, 2, 3]).tolist())
        self.seen.append(self.trainer.evaluate(self.batches[:1]))
        self.seen += self.trainer.read()


@pytest.mark.parametrize(
    ("place", "precisions"),
    [
        ("cpu", ("fp32", "fp32")),
        pytest.param("cuda", ("fp32", "bf16"), marks=[pytest.mark.gpu, pytest.mark.ampere]),
        pytest.param("cuda", ("tf32", "bf16"), marks=[pytest.mark.gpu, pytest.mark.ampere]),
    ],
)
def test_models_that_take_turns_change_no_bit(place: str, precisions: tuple) -> None:
    """Neither while both are there, nor when one was dropped and another made in its place."""
    shapes = [(place, precisions[0], 2, 37, 1), (place, precisions[1], 1, 64, 2)]
    alone = []
    for shape in shapes:
        run = TrainingRun(*shape)
        for _ in range(6):
            run.turn()
        alone.append(run.seen)
    first, second = (TrainingRun(*shape) for shape in shapes)
    for i in range(6):
        first.turn()
        second.turn()
        if i == 2:
            assert second.seen == alone[1][: len(second.seen)]
            second = TrainingRun(*shapes[1])
    assert first.seen == alone[0]
    assert second.seen == alone[1][: len(second.seen)]


@pytest.mark.gpu
def test_flash_and_materialized_attention_agree() -> None:
    flash, materialized = (
        loss_and_gradients(model_on("cuda", precision="tf32", attention=attention), BATCH)
        for attention in ("flash", "materialized")
    )
    for name, gradient in flash[1].items():
        assert relative_error(gradient, materialized[1][name]) < 4e-3, name


@pytest.mark.parametrize("recompute", [1, 2])
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_recomputing_changes_no_bit(place: str, recompute: int) -> None:
    kept, again = (
        loss_and_gradients(model_on(place, recompute=level), BATCH) for level in (0, recompute)
    )
    assert kept[0] == again[0]
    for name, gradient in kept[1].items():
        np.testing.assert_array_equal(gradient, again[1][name], err_msg=name)


def test_recomputing_takes_less_memory() -> None:
    device = HostDevice("cpu")
    totals = [plan_model(SMALL, device, 4, 64, recompute=level).total for level in (0, 1, 2)]
    gelu = 4 * 4 * 64 * 4 * SMALL.channels
    assert totals[0] - totals[1] == gelu * (SMALL.num_layers - 1)
    assert totals[1] - totals[2] == 2 * gelu // 4 * (SMALL.num_layers - 1)


@pytest.mark.parametrize("place", PLACES)
def test_weights_follow_the_float32_parameters(place: str) -> None:
    from numbagpt.gpu.vec import float32_to_bf16

    model = model_on(place, precision="bf16")
    before = model.parameters()
    trainer = Trainer(model)
    trainer.step([BATCH], 1e-3)
    list(trainer.read())
    for name, values in model.parameters().items():
        assert (values != before[name]).any(), name
        weights = model.device.to_host(model.weights[name])
        np.testing.assert_array_equal(weights, float32_to_bf16(values), err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_graphs_change_no_bit(precision: str) -> None:
    runs = []
    for use_graphs in (True, False):
        device = select_device("cuda", use_graphs)[0]
        trainer = Trainer(make_model(SMALL, 1, T, device, precision=precision), 2)
        results = []
        for _ in range(4):
            trainer.step([BATCH, BATCH], 1e-3)
            results += trainer.read()
        runs.append(results)
    assert runs[0] == runs[1]


@pytest.mark.gpu
def test_bf16_logits_for_sampling() -> None:
    model = model_on("cuda", precision="bf16", training=False)
    exact = make_model(SMALL, 1, T, HostDevice("cpu", np.float64), training=False)
    tokens = random_batch(SMALL, 1, T, 3)[0][0].tolist()
    for n in (1, 20, T):
        error = relative_error(
            model.next_token_logits(tokens[:n]), exact.next_token_logits(tokens[:n])
        )
        assert error < 1e-2


def test_the_precision_is_chosen_by_shape_and_device() -> None:
    assert best_precision(HostDevice("cpu"), SMALL) == "fp32"

    class Gpu:
        name, real = "cuda", np.float32
        compute_capability = (9, 0)

    assert best_precision(Gpu(), SMALL) == "bf16"
    odd_heads = GPT2Config(num_heads=3, channels=36)
    assert best_precision(Gpu(), odd_heads) == "tf32"
    Gpu.compute_capability = (7, 5)
    assert best_precision(Gpu(), SMALL) == "fp32"


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            SMALL,
            {"precision": "bf16", "attention": "materialized"},
            "materialized attention is float32; expected --precision fp32 with it$",
        ),
        (
            SMALL,
            {"precision": "fp32", "attention": "flash"},
            "expected --precision bf16 with it; or leave out --attention",
        ),
        (
            GPT2Config(num_heads=3, channels=36),
            {"precision": "bf16"},
            "36 channels; bf16 needs a multiple of 8, .*; use --precision fp32$",
        ),
        (
            GPT2Config(num_heads=2, channels=48),
            {"precision": "bf16"},
            "no flash attention in bf16 for heads of 24 channels on this device; use --precision "
            "fp32 with --attention materialized$",
        ),
        (SMALL, {"precision": "fp16"}, "precision is 'fp16'; expected one of fp32, tf32, bf16"),
        (
            SMALL,
            {"attention": "materialised"},
            "attention is 'materialised'; expected one of None, flash, materialized",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    config: GPT2Config, options: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        plan_model(config, HostDevice("sim"), 1, 16, **options)


class Gpu(HostDevice):
    """Has the precisions of a GPU of compute capability 8.0, or of one before."""

    def __init__(self, precisions: tuple) -> None:
        super().__init__("sim")
        self.precisions = precisions


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"precision": "bf16", "attention": "materialized"}, "expected --precision fp32 or tf32 "),
        ({"precision": "fp32", "attention": "flash"}, "expected --precision tf32 or bf16 with it"),
    ],
)
def test_a_gpu_is_offered_all_precisions(options: dict, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        plan_model(SMALL, Gpu(PRECISIONS), 1, 16, **options)


@pytest.mark.parametrize("device", [HostDevice("cpu"), Gpu(("fp32",))], ids=["cpu", "turing"])
def test_flash_attention_where_there_is_none_is_told_where_it_is(device: HostDevice) -> None:
    with pytest.raises(UserError) as error:
        plan_model(SMALL, device, 1, 16, attention="flash")
    assert str(error.value) == (
        "flash attention computes on tensor cores, which do not multiply float32; expected a GPU "
        "from compute capability 8.0 on, or --device sim --precision bf16 with it; or leave out "
        "--attention"
    )


def test_parameters_start_in_both_types() -> None:
    from numbagpt.gpu.vec import float32_to_bf16

    model = model_on("sim", precision="bf16")
    for name, values in scaled_parameters(SMALL, 1).items():
        np.testing.assert_array_equal(model.params[name], values)
        np.testing.assert_array_equal(model.weights[name], float32_to_bf16(values))
