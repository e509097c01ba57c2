"""Muon for the matrices of the layers, AdamW for everything else, one schedule for both."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ADAM_ONLY = ("embed", "lm_head")


def orthogonalize(update: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration of [batch, rows, columns] toward the nearest orthogonal matrices.

    The quintic's coefficients trade exactness for speed: singular values end within about 0.7 to 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.bfloat16() if update.is_cuda else update
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.transpose(-1, -2) if tall else x).to(update.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; scaled so that its root mean square is 0.2 of the rate."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.02})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for p in group["params"]:
                by_shape.setdefault(tuple(p.shape), []).append(p)
            for shape, params in by_shape.items():
                for p in params:
                    if "momentum" not in self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
                grads = [p.grad for p in params]
                moments = [self.state[p]["momentum"] for p in params]
                torch._foreach_lerp_(moments, grads, 1 - group["momentum"])
                ahead = torch._foreach_lerp(grads, moments, group["momentum"])
                update = orthogonalize(torch.stack(ahead))
                rate = group["lr"] * 0.2 * max(shape) ** 0.5
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(params, list(update.unbind()), alpha=-rate)


def make_optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """`lr` is the peak rate of both; the schedule scales it through `set_rate`."""
    matrices, others = [], []
    for name, p in model.named_parameters():
        muon = p.dim() == 2 and not any(part in name for part in ADAM_ONLY)
        (matrices if muon else others).append(p)
    fused = others[0].is_cuda
    adam = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
    optimizers: list[torch.optim.Optimizer] = [Muon(matrices, lr), adam]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = lr
    return optimizers


def set_rate(optimizers: list[torch.optim.Optimizer], step: int, total: int, warmup: int) -> float:
    """Linear warm-up, flat, then linear to zero over the last 40 %; returns the factor."""
    factor = min(1.0, (step + 1) / warmup, 2.5 * (total - step) / total)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
    return factor
