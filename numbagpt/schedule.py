"""The learning rate of each step: linear warm-up, then a cosine down to a fraction of the peak.

    warm-up   lr(s) = peak (s + 1) / warmup_iters                    s < warmup_iters
    cosine    lr(s) = low + (peak - low) (1 + cos(pi r)) / 2         low = peak decay_frac
              r     = (s - warmup_iters) / (num_iterations - warmup_iters)

Steps are counted from 0. The schedule is the one of llm.c's trainers (github.com/karpathy/llm.c);
the cosine is Loshchilov and Hutter's, 2016 (arXiv:1608.03983), without restarts.
"""

import math


def learning_rate_at(
    step: int, peak: float, warmup_iters: int, num_iterations: int, decay_frac: float
) -> float:
    """The learning rate of step `step`, counted from 0.

    peak            the highest learning rate, reached when the warm-up ends
    warmup_iters    steps of linear warm-up; 0 starts at the peak
    num_iterations  steps in all; from there on the learning rate stays at its lowest
    decay_frac      the lowest learning rate as a fraction of the peak: 1 keeps it constant
    """
    if step < warmup_iters:
        return peak * (step + 1) / warmup_iters
    low = peak * decay_frac
    if step >= num_iterations:
        return low
    progress = (step - warmup_iters) / (num_iterations - warmup_iters)
    return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * progress))
