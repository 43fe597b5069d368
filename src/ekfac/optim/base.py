"""What EKFAC, KFAC and Preconditioner share: an engine on a model, and everything around a step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter
from typing_extensions import Self

from ekfac.curvature.operators import Curvature
from ekfac.curvature.summary import Summary, summarise
from ekfac.optim.distributed.agreement import refuse_sharded
from ekfac.optim.engine import Engine
from ekfac.optim.state import exchange


class Base:
    """An engine on a model."""

    model: nn.Module
    engine: Engine

    def statistics(self) -> AbstractContextManager[None]:
        """Take factors and s* from backward passes inside, in place of the training loss's; leave ``.grad`` alone.

        For the true Fisher: ``with opt.statistics(): sampled_loss.backward(retain_graph=True)``.
        """
        return self.engine.collector.statistics()

    def paused(self) -> AbstractContextManager[None]:
        """Capture nothing of forwards and backwards inside."""
        return self.engine.collector.capture.paused()

    def summary(self) -> Summary:
        """Tell which block covers each parameter, its factor sizes and its memory."""
        engine = self.engine
        return summarise(engine.partition.blocks, lambda block: engine.method_of(block).numbers(block))

    def curvature(self) -> Curvature:
        """Return what has been learnt so far as an operator: products, solves, spectrum; a snapshot."""
        return exchange.curvature(self.engine)

    def seed(self, operator: Curvature) -> None:
        """Start from a KFAC or EKFAC operator of the same model instead of from nothing."""
        exchange.seed(self.engine, operator)

    def close(self) -> None:
        """Remove the hooks from the model and let go of everything that is kept to be replayed."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_model(model: Any) -> None:
    """Refuse what is not a module with at least one trainable real parameter."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r} must be a torch.nn.Module (the model itself, not its parameters)")
    refuse_sharded(model)
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("model has no trainable parameter: nothing to precondition")
    for name, p in trainable:
        if isinstance(p, UninitializedParameter):
            raise ValueError(
                f"parameter '{name}' has no shape yet: call the model once on a batch, then construct this"
            )
        if p.is_complex():
            raise ValueError(f"parameter '{name}' is complex ({p.dtype}). Allowed: real parameters")
