"""Everything a GPT-2 on a device holds, and the views that its operations work on."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from numbagpt.config import GPT2Config
from numbagpt.device import Device
from numbagpt.errors import OutOfMemory, UserError
from numbagpt.gpu.vec import float32_to_bf16
from numbagpt.memory import MIB, MemoryPlan
from numbagpt.modes import ATTENTIONS, PRECISIONS
from numbagpt.ops.encoder import token_runs
from numbagpt.ops.flash_attention import supports
from numbagpt.ops.matmul import transpose_pays
from numbagpt.tensors import FlatTensors, layout_bytes, parameter_shapes
from numbagpt.words import counted

# Values in 128 bits: rows of activations must start on such a boundary.
BF16_VECTOR = 8


def best_precision(device: Device, config: GPT2Config) -> str:
    """The fastest precision that the device has for a model of this shape."""
    if device.name != "cuda" or device.compute_capability < (8, 0):
        return "fp32"
    has_flash = supports(config.head_size, np.uint16, device.compute_capability)
    return "bf16" if has_flash and config.channels % BF16_VECTOR == 0 else "tf32"


def plan_model(
    config: GPT2Config,
    device: Device,
    B: int,
    T: int,
    precision: str = "fp32",
    training: bool = True,
    attention: str | None = None,
    recompute: int = 0,
) -> MemoryPlan:
    """The memory that a model made with these arguments takes, before it is taken.

    attention   "flash" or "materialized"; None takes flash where precision and device have it
    recompute   see MemoryPlan

    Raises UserError if T exceeds config.max_seq_len, or the precision or the attention asked for is
    not there.
    """
    for what, name, names in (
        ("precision", precision, PRECISIONS),
        ("attention", attention, (None, *ATTENTIONS)),
    ):
        if name not in names:
            raise UserError(f"{what} is {name!r}; expected one of {', '.join(map(str, names))}")
    if T > config.max_seq_len:
        raise UserError(
            f"sequence length is {T}; this model's longest context is {config.max_seq_len}: "
            f"use at most that, or another model"
        )
    if precision == "bf16" and config.channels % BF16_VECTOR:
        raise UserError(
            f"the model has {config.channels} channels; bf16 needs a multiple of {BF16_VECTOR}, "
            f"for 128-bit access; use {_other_precisions(device, precision)}"
        )
    storage = np.uint16 if precision == "bf16" else device.real
    # fp32 is the mode of exact comparison, and the tensor cores' float32 is TF32
    has_flash = precision != "fp32" and supports(
        config.head_size, storage, device.compute_capability
    )
    if attention is None:
        attention = "flash" if has_flash or precision == "bf16" else "materialized"
    if attention == "flash" and precision == "fp32":
        fix = _other_precisions(device, precision) or (
            "a GPU from compute capability 8.0 on, or --device sim --precision bf16"
        )
        raise UserError(
            "flash attention computes on tensor cores, which do not multiply float32; expected "
            f"{fix} with it; or leave out --attention"
        )
    if attention == "flash" and not has_flash:
        raise UserError(
            f"there is no flash attention in {precision} for heads of "
            f"{counted(config.head_size, 'channel')} on this device; use "
            f"{_other_precisions(device, 'bf16')} with --attention materialized"
        )
    if attention == "materialized" and precision == "bf16":
        raise UserError(
            "materialized attention is float32; expected "
            f"{_other_precisions(device, precision)} with it"
        )
    return MemoryPlan(config, B, T, training, attention, recompute, storage, device.real)


def _other_precisions(device: Device, precision: str) -> str:
    """The flag with what the device has but that precision; nothing if it has no other."""
    others = [other for other in device.precisions if other != precision]
    return f"--precision {' or '.join(others)}" if others else ""


class ModelState:
    """Buffers of one GPT-2 on one device, with room for batches of up to (B, T) tokens.

    params, grads       the 16 parameter tensors and their gradients, float32
    weights             what the forward pass reads: params, or a bf16 copy of them
    moments             AdamW's m and v
    acts, dacts         activations and their gradients, for the current batch shape
    inputs, targets     (B, T) int32 on the device; filled by `set_batch`
    mean_loss           (1,) float32 on the device; forward adds its batch's loss to it

    Parameters start as zeros: call load_parameters. An inference model (training=False) keeps one
    layer's activations and has no gradients.
    Raises UserError if T exceeds config.max_seq_len, the memory does not suffice, or the device
    lacks the precision or the attention.
    """

    def __init__(
        self,
        config: GPT2Config,
        device: Device,
        B: int,
        T: int,
        precision: str = "fp32",
        training: bool = True,
        attention: str | None = None,
        recompute: int = 0,
    ) -> None:
        """The arguments are those of plan_model."""
        self.config, self.device, self.ops = config, device, device.ops
        self.B, self.T, self.training = B, T, training
        self.plan = plan_model(config, device, B, T, precision, training, attention, recompute)
        self.attention, self.recompute = self.plan.attention, recompute
        self.transpose_pays = transpose_pays(precision, device.compute_capability)
        device.check_precision(precision)
        self.precision = precision
        self._check_memory()

        self.shapes = parameter_shapes(config)
        self.params = self._parameters(self.plan.parameters())
        self.weights = self._parameters(self.plan.weights()) if self.plan.weights() else self.params
        self._acts_buffer = device.zeros(
            layout_bytes(self.plan.activations(B, T), dense=False), np.uint8
        )
        if training:
            self.grads = self._parameters(self.plan.parameters())
            self.moments = [self._parameters(self.plan.parameters()) for _ in range(2)]
            self._dacts_buffer = device.zeros(
                layout_bytes(self.plan.gradients(B, T), dense=False), np.uint8
            )
        # inputs, targets, order and starts lie in one buffer, so that one copy brings a batch
        self._batch = device.zeros(4 * B * T + 1, np.int32)
        self.mean_loss = device.zeros(1)
        self._views: dict[tuple[int, int], tuple] = {}
        self._select(B, T)

    def _parameters(self, layout: dict) -> FlatTensors:
        buffer = self.device.zeros(layout_bytes(layout, dense=True), np.uint8)
        return FlatTensors(layout, buffer, self.config.num_layers, dense=True)

    def _check_memory(self) -> None:
        free = self.device.free_memory()
        if free is None or self.plan.total <= free:
            return
        needs = (
            f"B={self.B}, T={self.T} needs {self.plan.total / MIB:,.0f} MiB and "
            f"{free / MIB:,.0f} MiB are free: "
        )
        if not self.training:  # B is 1 and T the model's context
            raise OutOfMemory(f"{needs}choose a smaller model, or end what else takes memory")
        if fits := self.plan.largest_batch(free):
            raise OutOfMemory(f"{needs}the largest batch size that fits is {fits}")
        smallest = replace(self.plan, B=1, recompute=2)
        recompute = "use --recompute 2, " if smallest.total <= free else ""
        raise OutOfMemory(
            f"{needs}not even B=1 fits; {recompute}shorten the sequence or choose a smaller model"
        )

    def _select(self, b: int, t: int) -> None:
        """Lay the activations' views out for batches of (b, t) tokens, b <= B and t <= T."""
        if (b, t) not in self._views:
            L, n = self.config.num_layers, b * t
            acts = FlatTensors(self.plan.activations(b, t), self._acts_buffer, L)
            dacts = None
            if self.training:
                dacts = FlatTensors(self.plan.gradients(b, t), self._dacts_buffer, L)
            inputs, targets = (self._batch[i * n : (i + 1) * n].reshape((b, t)) for i in (0, 1))
            runs = self._batch[2 * n : 3 * n], self._batch[3 * n : 4 * n + 1]
            self._views[b, t] = acts, dacts, inputs, targets, runs
        views = acts, dacts, *_ = self._views[b, t]
        if self.attention == "materialized":
            # another layout left values where the upper triangles lie, which nobody writes
            for layer in acts.layers if self.training else acts.layers[:1]:
                self.device.clear(layer.att)
            if self.training:
                self.device.clear(dacts.preatt)
        # last, or an interrupted call would leave a layout that only seems to be cleared
        self.acts, self.dacts, self.inputs, self.targets, self._runs = views

    @property
    def batch_elements(self) -> int:
        """int32 elements of one packed batch (see pack_batch)."""
        return 4 * self.B * self.T + 1

    def set_batch(self, batch: np.ndarray) -> None:
        """Queue the copy of a batch that pack_batch laid out; it must not change until then.

        Raises ValueError for one of another shape or type.
        """
        if batch.shape != (self.batch_elements,) or batch.dtype != np.int32:
            raise ValueError(
                f"a batch of {batch.shape} {batch.dtype}; expected ({self.batch_elements},) int32: "
                f"inputs and targets of B={self.B} by T={self.T}, int32, packed by pack_batch"
            )
        if self.inputs.shape != (self.B, self.T):
            self._select(self.B, self.T)
        self.device.upload(self._batch, batch)

    def load_parameters(self, parameters: dict[str, np.ndarray]) -> None:
        """Copy the 16 tensors, shaped as parameter_shapes says, into the model as float32.

        Raises KeyError for one that is not there, ValueError for one of another shape; the model
        then stays as it was.
        """
        for name, shape in self.shapes.items():
            if parameters[name].shape != shape:
                raise ValueError(f"{name} has shape {parameters[name].shape}, expected {shape}")
        for name in self.shapes:
            values = np.ascontiguousarray(parameters[name], self.device.real)
            self.device.upload(self.params[name], values)
            if self.weights is not self.params:
                self.device.upload(self.weights[name], float32_to_bf16(values))
            self.device.synchronize()  # the copies are done before `values` may go

    def each_parameter(self) -> Iterator[tuple[str, np.ndarray]]:
        """Names and values of the 16 tensors, one at a time in the host's memory."""
        for name in self.shapes:
            yield name, self.device.to_host(self.params[name])

    def parameters(self) -> dict[str, np.ndarray]:
        """The 16 tensors as NumPy arrays."""
        return dict(self.each_parameter())

    def gradients(self) -> dict[str, np.ndarray]:
        """The gradients of the 16 tensors as NumPy arrays."""
        return {name: self.device.to_host(self.grads[name]) for name in self.shapes}

    def zero_grad(self) -> None:
        """Queue clearing the gradients of the parameters and the loss."""
        self.device.clear(self.grads.memory)
        self.device.clear(self.mean_loss)


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Raise ValueError unless there are token ids and all are of the model's vocabulary.

    A GPU would read, and in the backward pass write, beside its arrays.
    """
    if ids.size == 0 or not 0 <= ids.min() <= ids.max() < vocab_size:
        found = f"{ids.min()} to {ids.max()}" if ids.size else "none"
        raise ValueError(
            f"token ids are {found}; expected 0 to {vocab_size - 1}, those of the model's "
            "vocabulary; use the tokenizer the model was made for"
        )


def pack_batch(
    inputs: np.ndarray, targets: np.ndarray, out: np.ndarray | None = None
) -> np.ndarray:
    """Lay out a batch as GPT2.set_batch wants it: inputs, targets and the runs of equal tokens.

    inputs, targets: (B, T) int32. Returns 4 B T + 1 int32, in `out` where it is given. Sorting the
    tokens takes the host about a millisecond for large batches, so it is done where the batches
    are read.
    """
    order, starts = token_runs(inputs)
    if out is None:
        out = np.empty(4 * inputs.size + 1, np.int32)
    return np.concatenate([inputs.reshape(-1), targets.reshape(-1), order, starts], out=out)
