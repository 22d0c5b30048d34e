"""GPT-2 in PyTorch on our parameters: the peer of tests where PyTorch is installed."""

import numpy as np
import torch
import torch.nn.functional as F

from numbagpt.config import GPT2Config


def pytorch_logits(
    config: GPT2Config, p: dict[str, torch.Tensor], inputs: torch.Tensor
) -> torch.Tensor:
    """(B, T, V) logits; p holds our 16 tensors."""
    B, T = inputs.shape
    C, NH, V = config.channels, config.num_heads, config.vocab_size
    x = p["wte"][inputs] + p["wpe"][:T]
    for l in range(config.num_layers):
        h = F.layer_norm(x, (C,), p["ln1w"][l], p["ln1b"][l], 1e-5)
        qkv = F.linear(h, p["qkvw"][l], p["qkvb"][l]).view(B, T, 3, NH, C // NH)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(B, T, C)
        x = x + F.linear(y, p["attprojw"][l], p["attprojb"][l])
        h = F.layer_norm(x, (C,), p["ln2w"][l], p["ln2b"][l], 1e-5)
        h = F.gelu(F.linear(h, p["fcw"][l], p["fcb"][l]), approximate="tanh")
        x = x + F.linear(h, p["fcprojw"][l], p["fcprojb"][l])
    x = F.layer_norm(x, (C,), p["lnfw"], p["lnfb"], 1e-5)
    return F.linear(x, p["wte"][:V])


def to_torch(
    parameters: dict[str, np.ndarray], dtype: torch.dtype, device: str
) -> dict[str, torch.Tensor]:
    """Our parameters as leaf tensors that require gradients."""
    return {
        name: torch.tensor(values, dtype=dtype, device=device, requires_grad=True)
        for name, values in parameters.items()
    }


def pytorch_loss_and_gradients(
    config: GPT2Config,
    parameters: dict[str, np.ndarray],
    inputs: np.ndarray,
    targets: np.ndarray,
    dtype: torch.dtype,
    device: str,
) -> tuple[float, dict[str, np.ndarray]]:
    """Mean cross-entropy of the batch and its gradient by each of the 16 tensors."""
    p = to_torch(parameters, dtype, device)
    logits = pytorch_logits(config, p, torch.tensor(inputs, dtype=torch.long, device=device))
    target = torch.tensor(targets, dtype=torch.long, device=device)
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    loss.backward()
    return loss.item(), {name: tensor.grad.cpu().numpy() for name, tensor in p.items()}
