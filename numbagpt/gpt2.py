"""GPT-2: the forward pass, the backward pass and the update, operation by operation.

The model is the one of Radford et al., "Language Models are Unsupervised Multitask Learners"
(2019), written as llm.c writes it: no autograd, each gradient computed by hand.

One invariant runs through the backward pass. Gradients of parameters accumulate (+=), so that
several batches can add up before an update. Gradients of activations are overwritten (=), which
saves a read, except along the residual stream, where two paths meet: layernorm_backward adds its
share to what the skip connection brought.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from numbagpt.gpu.profile import annotate
from numbagpt.gpu.vec import bf16_to_float32
from numbagpt.state import ModelState, check_ids
from numbagpt.tensors import DECAYED, LOGITS_ROWS
from numbagpt.tokenizer import END_OF_TEXT

# Sampling rounds its context up to a multiple of this: the activations' views, and on a GPU the
# captured graph, are made once for each length.
CONTEXT_STEP = 64

# The gradients that matmuls write, the rest being sums that only add.
MATMUL_WEIGHTS = ("wte", "qkvw", "attprojw", "fcw", "fcprojw")


class GPT2(ModelState):
    """The computation over a ModelState, made like it. Methods queue work on the device.

    Each pass that multiplies sets the device's precision first: another model may have another.
    """

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        # context length → the transformer's forward pass for one sequence, replayed
        self._forward_passes: dict[int, Callable[[], None]] = {}
        if self.training:
            self._sums = self.grads.runs(name for name in self.shapes if name not in MATMUL_WEIGHTS)

    def _transformer(self) -> None:
        """inputs → acts.lnf: everything up to the last layernorm."""
        ops, weights, acts = self.ops, self.weights, self.acts
        self.device.set_precision(self.precision)
        ops.encoder_forward(acts.encoded, self.inputs, weights.wte, weights.wpe)
        ops.layernorm_forward(*self._normed(0), acts.encoded, *self._norm(0))
        residual = acts.encoded
        for l, (w, a) in enumerate(zip(weights.layers, acts.layers, strict=True)):
            with annotate(f"layer {l} forward"):
                self._attention_forward(w, a)
                ops.matmul_forward(a.residual2, a.atty, w.attprojw, w.attprojb, residual)
                ops.layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, w.ln2w, w.ln2b)
                ops.matmul_gelu_forward(a.fch_gelu, a.fch, a.ln2, w.fcw, w.fcb)
                ops.matmul_forward(a.residual3, a.fch_gelu, w.fcprojw, w.fcprojb, a.residual2)
                ops.layernorm_forward(*self._normed(l + 1), a.residual3, *self._norm(l + 1))
                residual = a.residual3

    def _normed(self, l: int) -> tuple:
        """Where the layernorm before layer l, or after the last layer, puts what it computes."""
        if l == self.config.num_layers:
            return self.acts.lnf, self.acts.lnf_mean, self.acts.lnf_rstd
        a = self.acts.layers[l]
        return a.ln1, a.ln1_mean, a.ln1_rstd

    def _norm(self, l: int) -> tuple:
        """Weight and bias of the layernorm before layer l, or after the last layer."""
        if l == self.config.num_layers:
            return self.weights.lnfw, self.weights.lnfb
        return self.weights.layers[l].ln1w, self.weights.layers[l].ln1b

    def _attention_forward(self, w: object, a: object) -> None:
        """a.ln1 → a.atty, leaving in a.qkvr and a.lse or a.att what the backward pass needs."""
        ops, (B, T, C) = self.ops, a.atty.shape
        if self.attention == "flash":
            ops.matmul_forward(a.qkvr, a.ln1, w.qkvw, w.qkvb)
            ops.flash_attention_forward(a.atty, a.lse, a.qkvr)
        else:
            # q, k and v are permuted out of `output`, where the product leaves them
            output = self.acts.output
            qkv = output[: B * T * 3 * C].reshape((B, T, 3 * C))
            ops.matmul_forward(qkv, a.ln1, w.qkvw, w.qkvb)
            ops.attention_forward(a.atty, a.qkvr, a.att, output)

    def _attention_backward(
        self, dbtc: object, w: object, g: object, a: object, accumulate: bool
    ) -> None:
        """dbtc: gradient of a.atty → gradient of a.ln1. Adds to g.qkvb, and to g.qkvw or writes it.

        Flash attention adds up g.qkvb on its way; else that is left to matmul_backward.
        """
        ops, dacts, (B, T, C) = self.ops, self.dacts, a.atty.shape
        dqkv = dacts.bt4c.reshape(-1)[: B * T * 3 * C].reshape((B, T, 3 * C))
        if self.attention == "flash":
            ops.flash_attention_backward(
                dqkv, dbtc, a.qkvr, a.atty, a.lse, dacts.scratch, dqkvb=g.qkvb
            )
            dqkvb = None
        else:
            # atty and fch have served, their memory holds (B, T, C) and dqkvr
            dqkvr = a.fch.reshape(-1)[: a.qkvr.size].reshape(a.qkvr.shape)
            ops.attention_backward(
                dqkv, dqkvr, dacts.preatt, self.acts.output, a.atty, dbtc, a.qkvr, a.att
            )
            dqkvb = g.qkvb
        ops.matmul_backward(
            dbtc,
            g.qkvw,
            dqkvb,
            dqkv,
            a.ln1,
            w.qkvw,
            dacts.scratch,
            accumulate=accumulate,
            transposed=self._room_for_transpose(self.acts.output),
        )

    def forward(
        self, scale: float = 1.0, with_gradient: bool = True, accumulate: bool = True
    ) -> None:
        """Queue the forward pass over inputs and targets.

        Adds scale * (mean cross-entropy in nats) to mean_loss. With with_gradient, `backward` may
        follow: the head's own gradients are computed here, since the logits, the largest tensor of
        all, are only there a chunk of rows at a time. Without accumulate, gradients and mean_loss
        start from zero.
        """
        ops, acts = self.ops, self.acts
        N = acts.losses.size
        if not accumulate:
            self.device.clear(self.mean_loss)
            if with_gradient:
                for gradients in self._sums:
                    self.device.clear(gradients)
        self._transformer()
        losses, targets = acts.losses.reshape(-1), self.targets.reshape(-1)
        with annotate("head"):
            for start in range(0, N, LOGITS_ROWS):
                rows = slice(start, min(start + LOGITS_ROWS, N))
                logits = self._logits(rows)
                ops.fused_classifier(
                    logits,
                    losses[rows],
                    None,
                    None,
                    targets[rows],
                    self.config.vocab_size,
                    dloss=scale / N,
                    write_dlogits=with_gradient,
                )
                if with_gradient:
                    ops.matmul_backward(
                        self._rows(self._dlnf, rows),
                        self.grads.wte,
                        None,
                        logits,
                        self._rows(acts.lnf, rows),
                        self.weights.wte,
                        self.dacts.scratch,
                        accumulate=accumulate or start > 0,
                        transposed=self._room_for_transpose(self._behind_dlnf),
                    )
            ops.mean_loss(self.mean_loss, acts.losses, scale / N)

    @property
    def _dlnf(self) -> object:
        """(B, T, C): the gradient of lnf, at the start of bt4c, which nobody needs until later."""
        shape = self.acts.lnf.shape
        return self.dacts.bt4c.reshape(-1)[: self.acts.lnf.size].reshape(shape)

    @property
    def _behind_dlnf(self) -> object:
        """The other three quarters of bt4c, as free."""
        return self.dacts.bt4c.reshape(-1)[self.acts.lnf.size :]

    def _room_for_transpose(self, array: object) -> object | None:
        """The array, of at least (B, T, C), where matmul_backward is faster with one to use."""
        return array if self.transpose_pays else None

    @staticmethod
    def _rows(array: object, rows: slice) -> object:
        """Rows of a (B, T, C) array seen as (N, C)."""
        C = array.shape[-1]
        return array.reshape(-1)[rows.start * C : rows.stop * C].reshape((-1, C))

    def _logits(self, rows: slice) -> object:
        """Queue lnf → logits for these rows; (rows, Vp), the start of acts.output."""
        Vp, n = self.config.padded_vocab_size, rows.stop - rows.start
        self.device.set_precision(self.precision)
        logits = self.acts.output[: n * Vp].reshape((n, Vp))
        self.ops.matmul_forward(logits, self._rows(self.acts.lnf, rows), self.weights.wte, None)
        return logits

    def backward(self, accumulate: bool = True) -> None:
        """Queue the rest of the backward pass of the last `forward`; adds to grads.

        Without accumulate, as `forward` was called, the matmuls write their gradients instead.
        """
        ops, weights, grads, acts, dacts = (
            self.ops,
            self.weights,
            self.grads,
            self.acts,
            self.dacts,
        )
        self.device.set_precision(self.precision)
        L = self.config.num_layers
        dbt4c, dresidual = dacts.bt4c, dacts.residual3
        # acts.lnf has served in `forward`: the layers use it for their (B, T, C)
        dbtc = acts.lnf
        matmul_backward = partial(
            ops.matmul_backward,
            scratch=dacts.scratch,
            accumulate=accumulate,
            transposed=self._room_for_transpose(acts.output),
        )
        layernorm_backward = partial(ops.layernorm_backward, scratch=dacts.scratch)
        # Each layernorm_backward leaves dresidual complete for the projection below it, whose
        # bias gradient is the sum of its rows: it adds them up while it has them in registers.
        layernorm_backward(
            dresidual,
            grads.lnfw,
            grads.lnfb,
            self._dlnf,
            acts.layers[-1].residual3,
            weights.lnfw,
            acts.lnf_mean,
            acts.lnf_rstd,
            accumulate=False,
            dresidual_sum=grads.layers[-1].fcprojb,
        )
        for l in reversed(range(L)):
            w, g, a = weights.layers[l], grads.layers[l], acts.layers[l]
            residual = acts.layers[l - 1].residual3 if l else acts.encoded
            with annotate(f"layer {l} backward"):
                self._recompute(l, residual)
                matmul_backward(dbt4c, g.fcprojw, None, dresidual, a.fch_gelu, w.fcprojw)
                ops.gelu_backward(dbt4c, g.fcb, dbt4c, a.fch, dacts.scratch)
                matmul_backward(dbtc, g.fcw, None, dbt4c, a.ln2, w.fcw)
                layernorm_backward(
                    dresidual,
                    g.ln2w,
                    g.ln2b,
                    dbtc,
                    a.residual2,
                    w.ln2w,
                    a.ln2_mean,
                    a.ln2_rstd,
                    dresidual_sum=g.attprojb,
                )
                matmul_backward(dbtc, g.attprojw, None, dresidual, a.atty, w.attprojw)
                self._attention_backward(dbtc, w, g, a, accumulate)
                layernorm_backward(
                    dresidual,
                    g.ln1w,
                    g.ln1b,
                    dbtc,
                    residual,
                    w.ln1w,
                    a.ln1_mean,
                    a.ln1_rstd,
                    dresidual_sum=grads.layers[l - 1].fcprojb if l else None,
                )
        ops.encoder_backward(grads.wte, grads.wpe, dresidual, self.inputs, *self._runs)

    def _recompute(self, l: int, residual: object) -> None:
        """Compute again what layer l's forward pass did not keep."""
        w, a = self.weights.layers[l], self.acts.layers[l]
        if self.recompute >= 1:
            self.ops.gelu_forward(a.fch_gelu, a.fch)
        if self.recompute >= 2:
            layernorm_forward = self.ops.layernorm_forward
            layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, residual, w.ln1w, w.ln1b)
            layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, w.ln2w, w.ln2b)

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
            self.ops.adamw_update(
                *(tensors[name].reshape(-1) for tensors in (self.params, self.grads, m, v)),
                hyper,
                grad_scale,
                beta1,
                beta2,
                eps,
                weight_decay if name in DECAYED else 0.0,
                copy=None if self.weights is self.params else self.weights[name].reshape(-1),
            )

    def next_token_logits(self, tokens: list[int]) -> np.ndarray:
        """(V,) float32 logits of the token that follows; at most max T tokens of context count.

        Raises ValueError if there are no tokens, or some that are not of the model's vocabulary.
        """
        ids = np.array(tokens[-self.T :])
        check_ids(ids, self.config.vocab_size)
        n = ids.size
        t = min(self.T, -(-n // CONTEXT_STEP) * CONTEXT_STEP)
        if self.inputs.shape != (1, t):
            self._select(1, t)
        # what follows the last token can't be seen by it: attention is causal
        padded = np.full((1, t), END_OF_TEXT % self.config.vocab_size, np.int32)
        padded[0, :n] = ids
        self.device.upload(self.inputs, padded)
        if t not in self._forward_passes:
            self._forward_passes[t] = self.device.replayable(self._transformer)
        self._forward_passes[t]()
        row = self.device.to_host(self._logits(slice(n - 1, n)))[0, : self.config.vocab_size]
        return bf16_to_float32(row) if row.dtype == np.uint16 else row

    def logits(self) -> np.ndarray:
        """(B, T, V) float32 logits of the batch in `inputs`, on the host, to look at."""
        self._transformer()
        N, V = self.acts.losses.size, self.config.vocab_size
        chunks = [
            self.device.to_host(self._logits(slice(start, min(start + LOGITS_ROWS, N))))[:, :V]
            for start in range(0, N, LOGITS_ROWS)
        ]
        logits = np.concatenate(chunks).reshape((*self.inputs.shape, V))
        return bf16_to_float32(logits) if logits.dtype == np.uint16 else logits
