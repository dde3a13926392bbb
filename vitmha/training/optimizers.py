"""Optimisers: which parameters they get at which rate, several as one, and the schedule."""

import difflib
import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from torch import Tensor
from torch.optim import Muon, Optimizer

from vitmha.errors import UserError
from vitmha.models.encoder_decoder import EncoderDecoder, Model


def check_optimizer(name: str) -> None:
    """Refuses a name that is not known, with the nearest ones."""
    # Those of the second order need the graph of the gradients, which Lightning does not keep.
    known = [each for each in map(str, list_optimizers()) if not get_optimizer_info(each).second_order]
    if name not in known:
        near = ", ".join(difflib.get_close_matches(name, known, cutoff=0))
        raise UserError(f"--model.optimizer {name}: there is no such optimiser; the nearest are {near}.")


def named_optimizer(
    groups: list[dict[str, Any]], name: str, learning_rate: float, betas: tuple[float, float]
) -> Optimizer:
    """One of timm's factory, for parameters in groups.

    Args:
        groups: As `with_rate` gives them.
        name: As in `timm.optim.list_optimizers()`.
        learning_rate: Of groups that have none of their own.
        betas: For those that take two; the others keep their own.

    Raises:
        UserError: It needs a package or a device that is not here.
    """
    info = get_optimizer_info(name)
    options: dict[str, Any] = {"betas": betas} if info.has_betas and info.num_betas == 2 else {}
    try:
        return create_optimizer_v2(groups, name, lr=learning_rate, **options)
    except (ImportError, AssertionError, RuntimeError) as error:
        raise UserError(
            f"--model.optimizer {name} cannot be made here: {str(error) or 'a package is missing'}"
        ) from None


def parameter_groups(
    model: Model, weight_decay: float, layer_decay: float = 1.0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All trainable parameters, each once, by how they are optimised.

    Vectors (biases, norms, layer scale), tokens and positions do not decay. The learning rate of layer l has the factor
    layer_decay^(depth + 1 - l): 0 are the patches, prefix tokens and positions, 1 to depth the blocks, and depth + 1
    the last norm, pooling, head and a whole decoder.

    Args:
        model: What is trained.
        weight_decay: Of the matrices.
        layer_decay: In (0, 1].

    Returns:
        Groups of the matrices of the blocks, and of all others. Beside `params` and `weight_decay` each has the factor
        `lr_scale`.

    Source:
        Bao et al. 2022 (BEiT, arXiv 2106.08254), `get_num_layer_for_vit`.
    """
    encoder, top = "encoder." if isinstance(model, EncoderDecoder) else "", model.config.depth + 1
    kinds: tuple[dict[float, list[Tensor]], ...] = ({}, {}, {})
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_undecayed = parameter.ndim == 1 or name.endswith(("token", "pos_embed", "probe"))
        kind = kinds[2 if is_undecayed else 0 if "blocks." in name else 1]
        layer = top
        if name.startswith(f"{encoder}blocks."):
            layer = 1 + int(name.removeprefix(encoder).split(".")[1])
        elif name.startswith(tuple(encoder + part for part in ("patch_embed", "pos_embed", "cls_", "dist_", "reg_"))):
            layer = 0
        kind.setdefault(layer_decay ** (top - layer), []).append(parameter)
    matrices, others, undecayed = (
        [{"params": parameters, "weight_decay": decay, "lr_scale": scale} for scale, parameters in kind.items()]
        for kind, decay in zip(kinds, (weight_decay, weight_decay, 0.0), strict=True)
    )
    return matrices, others + undecayed


def with_rate(groups: list[dict[str, Any]], learning_rate: float) -> list[dict[str, Any]]:
    """The groups, each with its own learning rate."""
    return [{**group, "lr": learning_rate * group["lr_scale"]} for group in groups]


def warmup_cosine(step: int, *, warmup: int, total: int) -> float:
    """The factor on the learning rate at an optimiser step: linear up to 1, then half a cosine down to 0.

    Args:
        step: Optimiser steps done, from 0.
        warmup: Steps of the linear part.
        total: All steps.

    Returns:
        A factor in [0, 1].
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(total - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


class StackedMuon(Muon):
    """PyTorch's Muon, with all matrices of one shape made orthogonal at once: the same steps in half of the time.

    Args:
        params: Matrices, or groups of them.
        lr: The learning rate; of a matrix with more rows than columns, times the root of their ratio.
        weight_decay: Decoupled.
        momentum: Of the running mean of the gradients, in [0, 1).
        nesterov: Whether the step looks ahead.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
    """

    def __init__(
        self, params: Any, lr: float, weight_decay: float = 0.1, momentum: float = 0.95, nesterov: bool = True
    ) -> None:
        super().__init__(params, lr, weight_decay, momentum, nesterov)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            alike: dict[tuple[int, ...], dict[Tensor, Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike.setdefault(parameter.shape, {})[parameter] = parameter.grad
            for shape, these in alike.items():
                parameters, gradients = list(these), list(these.values())
                for parameter in parameters:
                    if not self.state[parameter]:
                        self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                momenta = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                ahead = torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta
                updates = orthogonal(
                    torch.stack(tuple(ahead)), group["ns_coefficients"], group["ns_steps"], group["eps"]
                )
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                rate = group["lr"] * math.sqrt(max(1, shape[0] / shape[1]))
                torch._foreach_add_(parameters, list(updates.to(parameters[0].dtype)), alpha=-rate)
        return loss


def orthogonal(
    matrices: Float[Tensor, "count rows columns"],
    coefficients: tuple[float, float, float],
    steps: int,
    eps: float,
) -> Float[Tensor, "count rows columns"]:
    """U V^T of each matrix U S V^T, roughly, by Newton and Schulz's iteration in bfloat16; all as one product each."""
    a, b, c = coefficients
    x = matrices.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class Together(Optimizer):
    """Several optimisers, each with parameters of its own, as one: one step, one schedule, one state dict.

    Args:
        parts: The optimisers.
    """

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        # The very dictionaries of the parts, so that a schedule reaches them.
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
