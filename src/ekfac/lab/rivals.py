"""Other optimizers that need more than their class: Muon, which takes only matrices, and SOAP from PyPI."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ekfac.lab.registry import LabError


class MissingPackage(LabError):
    """An optimizer's package is not installed."""


class Together:
    """Several optimizers over different parameters, stepped as one."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all of them."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        """Step each in turn."""
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states by position."""
        return {str(index): optimizer.state_dict() for index, optimizer in enumerate(self.optimizers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load saved states."""
        for index, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state_dict[str(index)])


class FlatMuon(torch.optim.Muon):
    """torch's Muon for weights of any rank: a convolution's is treated as the matrix (out, in * kh * kw).

    torch's class accepts only matrices, so it gets views that share the weights' memory.

    Args:
        weights: Contiguous parameters of at least two dimensions.
        **options: Options of ``torch.optim.Muon``.
    """

    def __init__(self, weights: Iterable[nn.Parameter], **options: Any) -> None:
        self.weights = list(weights)
        for weight in self.weights:
            if not weight.is_contiguous():
                raise ValueError(f"a weight of shape {tuple(weight.shape)} is not contiguous, so it has no flat view")
        self.views = [nn.Parameter(weight.detach().view(len(weight), -1)) for weight in self.weights]
        super().__init__(self.views, **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the weights and of their views."""
        super().zero_grad(set_to_none)
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Pass the weights' gradients to their views, and step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for weight, view in zip(self.weights, self.views, strict=True):
            view.grad = None if weight.grad is None else weight.grad.reshape(view.shape)
        super().step()  # type: ignore[no-untyped-call]
        return loss


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that Muon is meant for: those of two or more dimensions, except embedding tables.

    A bare parameter whose name is not a weight's, such as ``positions``, is taken to be an embedding table.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return [
        p
        for name, p in model.named_parameters()
        if p.requires_grad and p.ndim >= 2 and id(p) not in tables and "weight" in name.rpartition(".")[2]
    ]


def muon(
    model: nn.Module,
    lr: float = 3e-3,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.0,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    hidden_only: bool = False,
    rest_lr: float | None = 1e-3,
) -> Together:
    """Make Muon for every weight matrix, and AdamW for biases, norms and embeddings.

    A convolution's weight is treated as the matrix (out, in * kh * kw).

    Args:
        model: The model.
        lr: Muon's learning rate.
        momentum: Muon's momentum.
        nesterov: Whether to use Nesterov momentum.
        weight_decay: Decoupled weight decay of both.
        ns_steps: Newton-Schulz iterations per step.
        adjust_lr_fn: ``"original"`` or ``"match_rms_adamw"``; see ``torch.optim.Muon``.
        hidden_only: Leave the first and the last matrix to AdamW, as users of Muon do in language models.
        rest_lr: AdamW's learning rate; ``None`` for Muon's.
    """
    chosen = matrices(model)
    if hidden_only:
        chosen = chosen[1:-1]
    if not chosen:
        kind = "hidden weight matrices" if hidden_only else "weight matrices"
        raise ValueError(f"needs a network with {kind}; this one has none")
    taken = {id(p) for p in chosen}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    first = FlatMuon(
        chosen,
        lr=lr,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        ns_steps=ns_steps,
        adjust_lr_fn=adjust_lr_fn,
    )
    if not rest:
        return Together([first])
    return Together([first, torch.optim.AdamW(rest, lr=lr if rest_lr is None else rest_lr, weight_decay=weight_decay)])


def soap(
    model: nn.Module,
    lr: float = 3e-3,
    betas: tuple[float, float] = (0.95, 0.95),
    shampoo_beta: float | None = None,
    weight_decay: float = 0.0,
    precondition_frequency: int = 10,
    max_precondition_dim: int = 10000,
    merge_dims: bool = False,
    precondition_1d: bool = False,
    correct_bias: bool = True,
    normalize_gradient: bool = False,
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Make SOAP from the package pytorch_optimizer, with its options but without weight decay by default.

    Raises:
        MissingPackage: If the package cannot be imported.
    """
    try:
        package = importlib.import_module("pytorch_optimizer")
    except ImportError as error:
        raise MissingPackage(f"optimizer soap needs the package pytorch_optimizer: pip install it ({error})") from None
    options = {
        "lr": lr,
        "betas": tuple(betas),
        "shampoo_beta": shampoo_beta,
        "weight_decay": weight_decay,
        "precondition_frequency": precondition_frequency,
        "max_precondition_dim": max_precondition_dim,
        "merge_dims": merge_dims,
        "precondition_1d": precondition_1d,
        "correct_bias": correct_bias,
        "normalize_gradient": normalize_gradient,
        "eps": eps,
    }
    try:
        found: torch.optim.Optimizer = package.SOAP([p for p in model.parameters() if p.requires_grad], **options)
    except Exception as error:  # the package defines its own exceptions for bad values
        raise ValueError(str(error).splitlines()[0]) from error
    return found
