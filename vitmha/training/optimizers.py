"""Optimizers, parameter groups, and the learning rate schedule."""

import difflib
import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from torch import Tensor
from torch.optim import Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from vitmha.errors import UserError
from vitmha.models.encoder_decoder import Model, get_encoder


def check_optimizer(name: str) -> None:
    """Checks that an optimizer of this name can be used.

    Raises:
        UserError: An unknown name, or a second-order optimizer: these differentiate through the gradient, whose graph
            Lightning does not keep.
    """
    known = [known for known in map(str, list_optimizers()) if not get_optimizer_info(known).second_order]
    if name not in known:
        nearest = ", ".join(difflib.get_close_matches(name, known, cutoff=0))
        raise UserError(f"optimizer {name}: unknown optimizer (did you mean one of {nearest}?).")


def create_optimizer(
    groups: list[dict[str, Any]], name: str, learning_rate: float, betas: tuple[float, float]
) -> Optimizer:
    """Returns an optimizer of timm's factory for parameter groups.

    Args:
        groups: Parameter groups, as `with_learning_rate` returns them.
        name: A name in `timm.optim.list_optimizers()`.
        learning_rate: For groups without their own.
        betas: For optimizers that take two; the others keep their defaults.

    Raises:
        UserError: The optimizer needs a package or a device that is not available.
    """
    info = get_optimizer_info(name)
    options: dict[str, Any] = {"betas": betas} if info.has_betas and info.num_betas == 2 else {}
    try:
        return create_optimizer_v2(groups, name, lr=learning_rate, **options)
    except (ImportError, AssertionError, RuntimeError) as error:
        raise UserError(f"optimizer {name} is not available here: {str(error) or 'a package is missing'}") from None


def parameter_groups(
    model: Model, weight_decay: float, layer_decay: float = 1.0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns all trainable parameters in groups, by weight decay and learning rate.

    Vectors (biases, norms, layer scale), tokens and position embeddings have no weight decay. The learning rate of
    layer l is multiplied by layer_decay^(depth + 1 - l). Layer 0 is the patch embedding with tokens and position
    embeddings, layers 1 to depth are the blocks, and layer depth + 1 is everything after them: the last norm, pooling,
    the head, and a whole decoder.

    `timm.optim.param_groups_layer_decay` computes the same factors (a test compares them). It is not used because it
    needs `group_matcher` and `no_weight_decay` on the models, does not separate the block matrices, which Muon takes,
    and orders the groups differently, so that saved optimizer states would no longer fit.

    Args:
        model: The model to be trained.
        weight_decay: For the matrices.
        layer_decay: In (0, 1].

    Returns:
        The groups of the blocks' matrices, and those of all other parameters. Each has `params`, `weight_decay`, and
        `lr_scale`, the factor on the learning rate.

    Source:
        Bao et al. 2022 (BEiT, arXiv 2106.08254), `get_num_layer_for_vit`.
    """
    layers, top = _layer_index(model), model.config.depth + 1
    block_matrices: dict[float, list[Tensor]] = {}  # by lr_scale, as the other two
    other_matrices: dict[float, list[Tensor]] = {}
    undecayed: dict[float, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim == 1 or name.endswith(("token", "pos_embed", "probe")):
            kind = undecayed
        else:
            kind = block_matrices if "blocks." in name else other_matrices
        kind.setdefault(layer_decay ** (top - layers[parameter]), []).append(parameter)

    def to_groups(kind: dict[float, list[Tensor]], decay: float) -> list[dict[str, Any]]:
        return [{"params": params, "weight_decay": decay, "lr_scale": scale} for scale, params in kind.items()]

    others = to_groups(other_matrices, weight_decay) + to_groups(undecayed, 0.0)
    return to_groups(block_matrices, weight_decay), others


def _layer_index(model: Model) -> dict[Tensor, int]:
    """Returns the layer of every parameter, as `parameter_groups` counts layers."""
    encoder = get_encoder(model)
    layers: dict[Tensor, int] = dict.fromkeys(model.parameters(), encoder.config.depth + 1)
    # Tokens and position embeddings are the parameters that the encoder holds itself.
    layers |= dict.fromkeys([*encoder.patch_embed.parameters(), *encoder.parameters(recurse=False)], 0)
    for layer, block in enumerate(encoder.blocks, start=1):
        layers |= dict.fromkeys(block.parameters(), layer)
    return layers


def with_learning_rate(groups: list[dict[str, Any]], learning_rate: float) -> list[dict[str, Any]]:
    """Returns the groups with `lr`, the learning rate times their `lr_scale`."""
    return [{**group, "lr": learning_rate * group["lr_scale"]} for group in groups]


def warmup_cosine(step: int, *, warmup: int, total: int) -> float:
    """Returns the factor on the learning rate: linear warmup to 1, then half a cosine down to 0.

    Args:
        step: Optimizer steps done, from 0.
        warmup: Optimizer steps of the warmup.
        total: Optimizer steps of the whole run.

    Returns:
        A factor in [0, 1].

    Example:
        >>> warmup_cosine(6, warmup=0, total=12)
        0.5
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(total - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


class FactorSchedule(LambdaLR):
    """PyTorch's `LambdaLR`, which leaves parameter groups that are added during training to whoever adds them.

    Lightning's `BackboneFinetuning` adds one and sets its learning rate itself; `LambdaLR` would fail.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
        >>> schedule = FactorSchedule(optimizer, lambda step: 0.5**step)
        >>> optimizer.add_param_group({"params": [torch.zeros(1)], "lr": 3.0})
        >>> optimizer.step()
        >>> schedule.step()
        >>> [group["lr"] for group in optimizer.param_groups]
        [1.0, 3.0]
    """

    def get_lr(self) -> list[float | Tensor]:
        added = self.optimizer.param_groups[len(self.base_lrs) :]
        return [*super().get_lr(), *(group["lr"] for group in added)]


class BatchedMuon(Muon):
    """PyTorch's Muon, with all matrices of one shape orthogonalized in one batched iteration.

    The step is that of `torch.optim.Muon` and of `timm.optim.Muon` with the same coefficients, up to rounding. Both
    iterate one matrix at a time: on two CPU cores their step takes 3.0 times as long for the parameters of
    configs/quickstart.yaml, 2.3 times for those of configs/cifar10.yaml (benchmarks/train_step.py --table optimizer).

    Args:
        params: Matrices, or groups of them.
        lr: Learning rate; for a matrix with more rows than columns it is multiplied by sqrt(rows / columns).
        weight_decay: Decoupled weight decay.
        momentum: Of the running mean of the gradients, in [0, 1).
        nesterov: Whether to use Nesterov momentum.

    Source:
        Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
    """

    def __init__(
        self, params: Any, lr: float, weight_decay: float = 0.1, momentum: float = 0.95, nesterov: bool = True
    ) -> None:
        super().__init__(params, lr, weight_decay, momentum, nesterov)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for parameters in by_shape.values():
                self._update(group, parameters)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Takes the step for parameters of one shape."""
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        momenta = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        directions = torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta
        updates = orthogonalize(
            torch.stack(tuple(directions)), group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        rows, columns = parameters[0].shape
        rate = group["lr"] * math.sqrt(max(1, rows / columns))
        torch._foreach_add_(parameters, list(updates.to(parameters[0].dtype)), alpha=-rate)


def orthogonalize(
    matrices: Float[Tensor, "count rows columns"],
    coefficients: tuple[float, float, float],
    steps: int,
    eps: float,
) -> Float[Tensor, "count rows columns"]:
    """Returns approximately U V^T of each matrix U S V^T, by a quintic Newton-Schulz iteration in bfloat16.

    Args:
        matrices: Matrices of one shape, iterated as one batch.
        coefficients: a, b and c in X <- a X + (b A + c A^2) X with A = X X^T.
        steps: Number of iterations.
        eps: Smallest norm that a matrix is divided by at the start.
    """
    a, b, c = coefficients
    x = matrices.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class CombinedOptimizer(Optimizer):
    """Several optimizers with parameters of their own as one: one step, one schedule, one state dict.

    `LitViT` combines Muon and AdamW with it: `torch.optim.Muon` takes matrices only, and two optimizers in one
    LightningModule need manual optimization, without Lightning's gradient accumulation and clipping.

    Args:
        optimizers: The optimizers.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        """Holds the dictionaries of the optimizers themselves, so that a schedule changes their learning rates."""
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self._share_groups()


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """Returns the learning rate as `lr`, that of Muon in a `CombinedOptimizer` with AdamW as `muon_lr`.

    With layer decay and in other parameter groups that differ, it is the largest: that of the head.

    Example:
        >>> learning_rates(torch.optim.SGD([torch.zeros(1)], lr=0.5))
        {'lr': 0.5}
    """
    if isinstance(optimizer, CombinedOptimizer):
        muon, adamw = optimizer.optimizers
        return {**learning_rates(adamw), "muon_lr": learning_rates(muon)["lr"]}
    return {"lr": max(float(group["lr"]) for group in optimizer.param_groups)}
