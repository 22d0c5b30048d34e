"""The training step: gradients of one or more batches, their norm, and the update.

The host only queues work. Batches and the learning rate travel to the device through staging
buffers, loss and gradient norm travel back the same way, and nobody waits: the result of a step is
read while the next one runs. Two steps are in flight then, so there are two slots of staging
buffers, and no buffer is written to before the result of the step that reads it is known. Within a
step of many batches the host is two ahead at most, so that a step that is given up ends soon.

After the first steps both parts, gradients and update, are replayed CUDA graphs. That works because
all that changes from step to step lies in device memory, or in the slot, between which and the
device the update's graph copies. So a step of one batch costs the host four calls: copy the batch,
launch the two graphs, mark the end.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from numbagpt.device import Device
from numbagpt.gpt2 import GPT2
from numbagpt.gpu.profile import annotate
from numbagpt.ops.global_norm import global_norm_partials
from numbagpt.pool import BufferPool
from numbagpt.state import check_ids, pack_batch


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did: mean loss in nats, norm of the gradients before clipping."""

    loss: float
    grad_norm: float


class _Slot:
    """What one step in flight reads from and writes to in the host's memory."""

    def __init__(self, device: Device, update: Callable[["_Slot"], None]) -> None:
        self.batches: list[np.ndarray] = []
        self.hyper = device.staging(3, np.float32)
        self.stats = device.staging(2, np.float32)
        self.update = device.replayable(partial(update, self))
        self.mark_end, self.wait = device.marker()


class Trainer:
    """AdamW training of one model.

    accumulation_steps   batches whose gradients add up to one step; the loss is their mean
    beta1, beta2, eps    AdamW's constants
    weight_decay         decoupled, on matrices and embeddings only
    grad_clip            largest global norm of the gradients; 0 clips nothing

    A step whose norm is not finite leaves parameters and moments as they were.

    AdamW's moments lie in the model: they start from zero here, and a trainer that was made for
    the model before takes no more steps, but raises RuntimeError.
    """

    def __init__(
        self,
        model: GPT2,
        accumulation_steps: int = 1,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
    ) -> None:
        """Raises ValueError for a model that was made for inference."""
        if not model.training:
            raise ValueError(
                "the model was made with training=False, without room for gradients; expected one "
                "made with training=True"
            )
        device = model.device
        self.model = model
        self.steps = 0
        self._accumulation_steps = accumulation_steps
        self._constants = beta1, beta2, eps, weight_decay
        self._grad_clip = grad_clip
        self._hyper = device.zeros(3)
        self._stats = device.zeros(2)  # loss, norm
        self._grad_scale = device.zeros(1)
        self._gradients = model.grads.memory.view(device.real)
        self._partials = device.zeros(global_norm_partials(self._gradients.size))
        self._pool = BufferPool(lambda: device.staging(model.batch_elements, np.int32))
        # two steps in flight: the device works on one while the host fills the other
        self._slots = [_Slot(device, self._enqueue_update) for _ in range(2)]
        self._pending: deque[_Slot] = deque()
        self._mark_batch, self._wait_for_batch = device.marker()
        for moment in model.moments:
            device.clear(moment.memory)
        self._mean_loss = model.mean_loss = self._stats[:1]
        # the first batch of a step writes gradients and loss, the others add to them
        self._micro_steps = [
            device.replayable(partial(self._enqueue_micro_step, accumulate))
            for accumulate in (False, True)
        ]
        self._validate = device.replayable(partial(model.forward, with_gradient=False))

    def _enqueue_micro_step(self, accumulate: bool) -> None:
        with annotate("forward"):
            self.model.forward(scale=1.0 / self._accumulation_steps, accumulate=accumulate)
        with annotate("backward"):
            self.model.backward(accumulate)

    def _enqueue_update(self, slot: _Slot) -> None:
        model, device = self.model, self.model.device
        with annotate("update"):
            device.upload(self._hyper, slot.hyper)
            model.ops.global_norm(
                self._stats[1:], self._grad_scale, self._gradients, self._partials, self._grad_clip
            )
            model.update(self._hyper, self._grad_scale, *self._constants)
            device.download(slot.stats, self._stats)

    def pack(self, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """A batch for `step` and `evaluate` (see state.pack_batch), in a buffer of the pool.

        Any thread may call it. The buffer is used again when nobody refers to the batch any more.
        Raises ValueError for ids that are not of the model's vocabulary.
        """
        for ids in (inputs, targets):
            check_ids(ids, self.model.config.vocab_size)
        return pack_batch(inputs, targets, self._pool.take())

    def step(self, batches: Iterable[np.ndarray], learning_rate: float) -> None:
        """Queue one optimizer step on accumulation_steps packed batches.

        If `batches` raises, the step is given up: parameters, moments and `steps` stay as they are.
        So it is if anything else interrupts it, although where that is the update itself, on a CPU,
        parameters and moments may be new in part.
        """
        if len(self._pending) == len(self._slots):
            raise RuntimeError("two steps are in flight: read() a result before the next step")
        self._check_newest()
        slot = self._slots[self.steps % len(self._slots)]
        for i, batch in zip(range(self._accumulation_steps), batches, strict=True):
            if i > 1:
                self._wait_for_batch()  # for i - 2: the device still has i - 1 to work on
            if i > 0:
                self._mark_batch()
            slot.batches.append(batch)  # keeps the buffer from the pool until it was copied
            self.model.set_batch(batch)
            self._micro_steps[i > 0]()
        t = self.steps + 1
        beta1, beta2, *_ = self._constants
        slot.hyper[:] = learning_rate, 1.0 - beta1**t, 1.0 - beta2**t
        slot.update()
        slot.mark_end()
        self._pending.append(slot)
        self.steps = t

    def _check_newest(self) -> None:
        """Raise RuntimeError if the model has a newer trainer, which then has its moments too."""
        if self.model.mean_loss is not self._mean_loss:
            raise RuntimeError(
                "the model has a newer Trainer, which has taken over its loss and AdamW's moments; "
                "use that one, or make another"
            )

    def read(self, in_flight: int = 0) -> Iterator[StepResult]:
        """Results of the oldest steps, waiting for them, until only `in_flight` are unread."""
        while len(self._pending) > in_flight:
            slot = self._pending[0]
            slot.wait()  # if this is interrupted, the result can still be read
            slot.batches.clear()
            loss, grad_norm = map(float, slot.stats)
            self._pending.popleft()
            yield StepResult(loss, grad_norm)

    def evaluate(self, batches: Iterable[np.ndarray]) -> float:
        """Mean loss over packed batches; changes neither parameters nor gradients.

        Not to be called while a step takes its batches. Raises ValueError if there are none.
        """
        model, device = self.model, self.model.device
        count, batch = 0, None
        self._check_newest()
        device.clear(model.mean_loss)
        for following in batches:  # made while the device works on the batch before
            device.synchronize()
            batch = following  # and only now the one before, which was copied, may go
            model.set_batch(batch)
            self._validate()
            count += 1
        if count == 0:
            raise ValueError("evaluate: no batches; expected one at least; is an iterator used up?")
        return float(device.to_host(model.mean_loss)[0]) / count
