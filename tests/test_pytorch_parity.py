"""GPT-2 124M on a GPU against PyTorch in float32, from the same weights and batch."""

import numpy as np
import pytest
from check import relative_error
from models import loss_and_gradients, random_batch, scaled_parameters

from numbagpt.config import PRESETS
from numbagpt.device import select_device
from numbagpt.gpt2 import GPT2
from numbagpt.state import pack_batch
from numbagpt.tensors import DECAYED
from numbagpt.training import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
torch = pytest.importorskip("torch")

B, T = 4, 1024
CONFIG = PRESETS["d12"]
LEARNING_RATE, WEIGHT_DECAY, STEPS = 3e-4, 0.1, 10


@pytest.fixture(scope="module")
def problem() -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Parameters, inputs and targets."""
    return scaled_parameters(CONFIG, 1), *random_batch(CONFIG, B, T, 2)


@pytest.fixture(autouse=True)
def _exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def make(parameters: dict[str, np.ndarray], precision: str) -> GPT2:
    model = GPT2(CONFIG, select_device("cuda")[0], B, T, precision)
    model.load_parameters(parameters)
    return model


def test_logits(problem: tuple) -> None:
    from peer import pytorch_logits, to_torch

    parameters, inputs, targets = problem
    p = to_torch(parameters, torch.float32, "cuda")
    with torch.no_grad():
        x = torch.tensor(inputs, dtype=torch.long, device="cuda")
        expected = pytorch_logits(CONFIG, p, x).cpu().numpy()
    model = make(parameters, "fp32")
    model.set_batch(pack_batch(inputs, targets))
    assert relative_error(model.logits(), expected) < 1e-4


def test_all_sixteen_gradients(problem: tuple) -> None:
    from peer import pytorch_loss_and_gradients

    parameters, inputs, targets = problem
    expected_loss, expected = pytorch_loss_and_gradients(
        CONFIG, parameters, inputs, targets, torch.float32, "cuda"
    )
    loss, gradients = loss_and_gradients(make(parameters, "fp32"), pack_batch(inputs, targets))
    errors = {name: relative_error(gradients[name], expected[name]) for name in gradients}
    print(f"loss {loss:.6f} {expected_loss:.6f}", errors)
    assert abs(loss - expected_loss) < 1e-4
    assert {name: error for name, error in errors.items() if not error < 1e-4} == {}


@pytest.fixture(scope="module")
def pytorch_losses(problem: tuple) -> list[float]:
    """Losses of ten AdamW steps on one batch."""
    import torch.nn.functional as F
    from peer import pytorch_logits, to_torch

    parameters, inputs, targets = problem
    p = to_torch(parameters, torch.float32, "cuda")
    groups = [
        {"params": [p[name] for name in p if name in DECAYED], "weight_decay": WEIGHT_DECAY},
        {"params": [p[name] for name in p if name not in DECAYED], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8)
    x = torch.tensor(inputs, dtype=torch.long, device="cuda")
    y = torch.tensor(targets, dtype=torch.long, device="cuda").flatten()
    losses = []
    for _ in range(STEPS):
        loss = F.cross_entropy(pytorch_logits(CONFIG, p, x).flatten(0, 1), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(p.values()), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("tf32", 2e-3)])
def test_ten_adamw_steps(
    problem: tuple, pytorch_losses: list[float], precision: str, tolerance: float
) -> None:
    parameters, inputs, targets = problem
    model = make(parameters, precision)
    trainer = Trainer(model, weight_decay=WEIGHT_DECAY, grad_clip=1.0)
    batch = pack_batch(inputs, targets)
    losses = []
    for _ in range(STEPS):
        trainer.step([batch], LEARNING_RATE)
        losses += [result.loss for result in trainer.read()]
    print(precision, [f"{a:.5f} {b:.5f}" for a, b in zip(losses, pytorch_losses, strict=True)])
    assert np.abs(np.subtract(losses, pytorch_losses)).max() < tolerance
    for name, values in model.parameters().items():
        moved = (values != parameters[name]).mean()
        assert moved > 0.5, f"{name}: {moved:.0%} of the elements moved"
