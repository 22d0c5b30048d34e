"""GPT-2: the forward pass, the backward pass and the update, operation by operation.

The model is the one of Radford et al., "Language Models are Unsupervised Multitask Learners"
(2019), written as llm.c writes it: no autograd, each gradient computed by hand.

One invariant runs through the backward pass. Gradients of parameters accumulate (+=), so that
several batches can add up before an update. Gradients of activations are overwritten (=), which
saves a read, except along the residual stream, where two paths meet: layernorm_backward adds its
share to what the skip connection brought.
"""

from functools import partial

import numpy as np

from numbagpt.config import GPT2Config
from numbagpt.device import Device
from numbagpt.errors import UserError
from numbagpt.memory import MIB, memory_plan
from numbagpt.ops.encoder import token_runs
from numbagpt.tensors import (
    DECAYED,
    FlatTensors,
    activation_shapes,
    flat_bytes,
    gradient_shapes,
    parameter_shapes,
    size,
)
from numbagpt.tokenizer import END_OF_TEXT

PRECISIONS = ("fp32", "tf32")

# Sampling rounds its context up to a multiple of this: the activations' views, and on a GPU the
# captured graph, are made once for each length.
CONTEXT_STEP = 64


class GPT2:
    """One GPT-2 on one device, with room for batches of up to (B, T) tokens.

    params, grads       the 16 parameter tensors and their gradients, float32
    moments             AdamW's m and v
    acts, dacts         activations and their gradients, for the current batch shape
    inputs, targets     (B, T) int32 on the device; filled by `set_batch`
    mean_loss           (1,) float32 on the device; forward adds its batch's loss to it

    Parameters start as zeros: call load_parameters. An inference model (training=False) keeps one
    layer's activations and has no gradients.
    Raises UserError if T exceeds config.max_seq_len or the memory does not suffice.
    """

    def __init__(
        self,
        config: GPT2Config,
        device: Device,
        B: int,
        T: int,
        precision: str = "fp32",
        training: bool = True,
    ) -> None:
        if T > config.max_seq_len:
            raise UserError(
                f"sequence length is {T}; this model's longest context is {config.max_seq_len}: "
                f"use at most that, or another model"
            )
        self.config, self.device, self.ops = config, device, device.ops
        self.B, self.T, self.training = B, T, training
        if device.name == "cuda":
            from numbagpt.gpu import blas

            blas.set_precision(precision)
        self.plan = memory_plan(config, B, T, training)
        self._check_memory()

        self.shapes = parameter_shapes(config)
        elements = flat_bytes(self.shapes) // 4
        self.params = FlatTensors(self.shapes, device.zeros(elements))
        self._acts_buffer = device.zeros(flat_bytes(self.plan.activations) // 4)
        if training:
            self.grads = FlatTensors(self.shapes, device.zeros(elements))
            self.moments = [FlatTensors(self.shapes, device.zeros(elements)) for _ in range(2)]
            self._dacts_buffer = device.zeros(flat_bytes(self.plan.gradients) // 4)
        N = B * T
        # inputs, targets, order and starts lie in one buffer, so that one copy brings a batch
        self._batch = device.zeros(4 * N + 1, np.int32)
        self.mean_loss = device.zeros(1)
        self._views: dict[tuple[int, int], tuple] = {}
        self._graphs: dict[tuple[int, int], object] = {}
        self._select(B, T)

    def _check_memory(self) -> None:
        free = self.device.free_memory()
        if free is None or self.plan.total <= free:
            return
        fits = self.plan.largest_batch(free)
        advice = f"the largest batch size that fits is {fits}" if fits else "not even B=1 fits"
        raise UserError(
            f"B={self.B}, T={self.T} needs {self.plan.total / MIB:,.0f} MiB and "
            f"{free / MIB:,.0f} MiB are free: {advice}"
            + ("" if fits else "; shorten the sequence or choose a smaller model")
        )

    def _select(self, b: int, t: int) -> None:
        """Lay the activations' views out for batches of (b, t) tokens, b <= B and t <= T."""
        if (b, t) not in self._views:
            L = self.config.num_layers if self.training else 1
            acts = FlatTensors(activation_shapes(self.config, b, t, L), self._acts_buffer)
            square = b, self.config.num_heads, t, t
            for layer in acts.layers:
                layer.att = layer.att[: size(square)].reshape(square)
            dacts = None
            if self.training:
                scratch = self.plan.gradients["scratch"][0]
                shapes = gradient_shapes(self.config, b, t, scratch)
                dacts = FlatTensors(shapes, self._dacts_buffer)
            n = b * t
            inputs, targets = (self._batch[i * n : (i + 1) * n].reshape((b, t)) for i in (0, 1))
            runs = self._batch[2 * n : 3 * n], self._batch[3 * n : 4 * n + 1]
            self._views[b, t] = acts, dacts, inputs, targets, runs
        self.acts, self.dacts, self.inputs, self.targets, self._runs = self._views[b, t]
        # Another layout leaves values where this one's upper triangles lie, which nobody writes.
        self.device.clear(self.acts.att)
        if self.training:
            self.device.clear(self.dacts.preatt)

    @property
    def batch_elements(self) -> int:
        """int32 elements of one packed batch (see pack_batch)."""
        return 4 * self.B * self.T + 1

    def set_batch(self, staging: np.ndarray) -> None:
        """Queue the copy of a batch that pack_batch laid out in a staging buffer."""
        if self.inputs.shape != (self.B, self.T):
            self._select(self.B, self.T)
        self.device.upload(self._batch, staging)

    def load_parameters(self, parameters: dict[str, np.ndarray]) -> None:
        """Copy the 16 tensors, shaped as parameter_shapes says, into the model as float32."""
        for name, shape in self.shapes.items():
            values = np.ascontiguousarray(parameters[name], np.float32)
            if values.shape != shape:
                raise ValueError(f"{name} has shape {values.shape}, expected {shape}")
            self.device.upload(self.params[name], values)
            self.device.synchronize()  # the copy is done before `values` may go

    def parameters(self) -> dict[str, np.ndarray]:
        """The 16 tensors as NumPy arrays."""
        return {name: self.device.to_host(self.params[name]) for name in self.shapes}

    def gradients(self) -> dict[str, np.ndarray]:
        """The gradients of the 16 tensors as NumPy arrays."""
        return {name: self.device.to_host(self.grads[name]) for name in self.shapes}

    def zero_grad(self) -> None:
        """Queue clearing the gradients of the parameters and the loss."""
        self.device.clear(self.grads.memory)
        self.device.clear(self.mean_loss)

    def _transformer(self) -> None:
        """inputs → acts.lnf: everything up to the last layernorm."""
        ops, params, acts = self.ops, self.params, self.acts
        ops.encoder_forward(acts.encoded, self.inputs, params.wte, params.wpe)
        residual = acts.encoded
        for l, p in enumerate(params.layers):
            a = acts.layers[l if self.training else 0]
            # attention permutes q, k and v out of `output`, where the matmul leaves them
            B, T, C = residual.shape
            qkv = acts.output[: B * T * 3 * C].reshape((B, T, 3 * C))
            ops.layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, residual, p.ln1w, p.ln1b)
            ops.matmul_forward(qkv, a.ln1, p.qkvw, p.qkvb)
            ops.attention_forward(a.atty, a.qkvr, a.att, acts.output)
            ops.matmul_forward(a.attproj, a.atty, p.attprojw, p.attprojb)
            ops.residual_forward(a.residual2, residual, a.attproj)
            ops.layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b)
            ops.matmul_forward(a.fch, a.ln2, p.fcw, p.fcb)
            ops.gelu_forward(a.fch_gelu, a.fch)
            ops.matmul_forward(a.fcproj, a.fch_gelu, p.fcprojw, p.fcprojb)
            ops.residual_forward(a.residual3, a.residual2, a.fcproj)
            residual = a.residual3
        ops.layernorm_forward(
            acts.lnf, acts.lnf_mean, acts.lnf_rstd, residual, params.lnfw, params.lnfb
        )

    @property
    def logits(self) -> object:
        """(B, T, Vp) float32, the start of acts.output: logits, after backward their gradient."""
        B, T = self.inputs.shape
        Vp = self.config.padded_vocab_size
        return self.acts.output[: B * T * Vp].reshape((B, T, Vp))

    def forward(self, scale: float = 1.0, with_gradient: bool = True) -> None:
        """Queue the forward pass over inputs and targets.

        Adds scale * (mean cross-entropy in nats) to mean_loss. With with_gradient, the logits are
        replaced by the gradient of that sum, ready for `backward`; without, they stay.
        """
        ops, acts = self.ops, self.acts
        N = acts.losses.size
        self._transformer()
        ops.matmul_forward(self.logits, acts.lnf, self.params.wte, None)
        ops.fused_classifier(
            self.logits,
            acts.losses,
            None,
            None,
            self.targets,
            self.config.vocab_size,
            dloss=scale / N,
            write_dlogits=with_gradient,
        )
        ops.mean_loss(self.mean_loss, acts.losses, scale / N)

    def backward(self) -> None:
        """Queue the backward pass of the last `forward`; adds to grads."""
        ops, params, grads, acts, dacts = self.ops, self.params, self.grads, self.acts, self.dacts
        B, T, C = acts.encoded.shape
        scratch, dbt4c, dresidual = dacts.scratch, dacts.bt4c, dacts.residual3
        # acts.lnf is done with after the head's backward: the layers use it for their (B, T, C)
        dbtc = acts.lnf
        dbt3c = dbt4c.reshape(-1)[: B * T * 3 * C].reshape((B, T, 3 * C))
        dlnf = dbt4c.reshape(-1)[: B * T * C].reshape((B, T, C))
        ops.matmul_backward(dlnf, grads.wte, None, self.logits, acts.lnf, params.wte, scratch)
        self.device.clear(dresidual)
        ops.layernorm_backward(
            dresidual,
            grads.lnfw,
            grads.lnfb,
            dlnf,
            acts.layers[-1].residual3,
            params.lnfw,
            acts.lnf_mean,
            acts.lnf_rstd,
            scratch,
        )
        layers = list(zip(params.layers, grads.layers, acts.layers, strict=True))
        for l, (p, g, a) in reversed(list(enumerate(layers))):
            residual = acts.layers[l - 1].residual3 if l else acts.encoded
            matmul_backward = partial(ops.matmul_backward, scratch=scratch)
            layernorm_backward = partial(ops.layernorm_backward, scratch=scratch)
            # the MLP; dresidual is the gradient of residual3 and, through the skip, of residual2
            matmul_backward(dbt4c, g.fcprojw, g.fcprojb, dresidual, a.fch_gelu, p.fcprojw)
            ops.gelu_backward(dbt4c, a.fch, dbt4c)
            matmul_backward(dbtc, g.fcw, g.fcb, dbt4c, a.ln2, p.fcw)
            layernorm_backward(
                dresidual, g.ln2w, g.ln2b, dbtc, a.residual2, p.ln2w, a.ln2_mean, a.ln2_rstd
            )
            # attention; atty and fch have served, their memory holds (B, T, C) and dqkvr
            matmul_backward(dbtc, g.attprojw, g.attprojb, dresidual, a.atty, p.attprojw)
            dqkvr = a.fch.reshape(-1)[: 3 * B * T * C].reshape(a.qkvr.shape)
            ops.attention_backward(
                dbt3c, dqkvr, dacts.preatt, acts.output, a.atty, dbtc, a.qkvr, a.att
            )
            matmul_backward(dbtc, g.qkvw, g.qkvb, dbt3c, a.ln1, p.qkvw)
            layernorm_backward(
                dresidual, g.ln1w, g.ln1b, dbtc, residual, p.ln1w, a.ln1_mean, a.ln1_rstd
            )
        ops.encoder_backward(grads.wte, grads.wpe, dresidual, self.inputs, *self._runs)

    def update(
        self,
        hyper: object,
        grad_scale: object,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
    ) -> None:
        """Queue one AdamW step (Loshchilov & Hutter, 2019) on all parameters.

        hyper        (3,) float32 on the device: learning rate, 1 - beta1^t, 1 - beta2^t
        grad_scale   (1,) float32 on the device: factor on every gradient; negative skips the step
        """
        m, v = self.moments
        for name in self.shapes:
            decay = weight_decay if name in DECAYED else 0.0
            self.ops.adamw_update(
                self.params[name].reshape(-1),
                self.grads[name].reshape(-1),
                m[name].reshape(-1),
                v[name].reshape(-1),
                hyper,
                grad_scale,
                beta1,
                beta2,
                eps,
                decay,
            )

    def next_token_logits(self, tokens: list[int]) -> np.ndarray:
        """(V,) float32 logits of the token that follows; at most max T tokens of context count."""
        tokens = tokens[-self.T :]
        n = len(tokens)
        t = min(self.T, -(-n // CONTEXT_STEP) * CONTEXT_STEP)
        if self.inputs.shape != (1, t):
            self._select(1, t)
        # what follows the last token can't be seen by it: attention is causal
        padded = np.full(t, END_OF_TEXT % self.config.vocab_size, np.int32)
        padded[:n] = tokens
        self.device.upload(self.inputs, padded.reshape(1, t))
        if (1, t) not in self._graphs:
            self._graphs[1, t] = self.device.replayable(self._transformer)
        self._graphs[1, t]()
        C, Vp = self.config.channels, self.config.padded_vocab_size
        last = self.acts.lnf.reshape(-1)[(n - 1) * C : n * C].reshape((1, C))
        row = self.acts.output[:Vp].reshape((1, Vp))
        self.ops.matmul_forward(row, last, self.params.wte, None)
        return self.device.to_host(row)[0, : self.config.vocab_size]


def pack_batch(inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Lay out a batch as GPT2.set_batch wants it: inputs, targets and the runs of equal tokens.

    inputs, targets: (B, T) int32. Returns 4 B T + 1 int32. Sorting the tokens takes the host about
    a millisecond for large batches, so it is done where the batches are read.
    """
    order, starts = token_runs(inputs)
    return np.concatenate([inputs.reshape(-1), targets.reshape(-1), order, starts], dtype=np.int32)
