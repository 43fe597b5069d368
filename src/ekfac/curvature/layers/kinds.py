"""Kinds of modules, and the class of :mod:`ekfac.curvature.layers` that reads each."""

from __future__ import annotations

from torch import nn

from ekfac.curvature.layers.attention import ProjectionLayer
from ekfac.curvature.layers.base import Layer
from ekfac.curvature.layers.convolution import ConvolutionLayer, Convs, TransposedConvolutionLayer, TransposedConvs
from ekfac.curvature.layers.embedding import (
    EmbeddingBagLayer,
    EmbeddingLayer,
    OwnForwardEmbeddingLayer,
)
from ekfac.curvature.layers.experts import ExpertsLayer
from ekfac.curvature.layers.linear import (
    BilinearLayer,
    Conv1DLayer,
    ForeignLinearLayer,
    LinearLayer,
    OwnForwardLinearLayer,
)
from ekfac.curvature.layers.norms import (
    BatchNormLayer,
    ForeignRMSNormLayer,
    GroupNormLayer,
    LayerNormLayer,
    RMSNormLayer,
)
from ekfac.curvature.layers.recurrent import Cells, Recurrent, RecurrentLayer

#: Kinds of modules and the class that reads them. A subclass counts as its base if it does not override ``forward``.
KINDS: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: LinearLayer,
    **dict.fromkeys(Convs, ConvolutionLayer),
    **dict.fromkeys(TransposedConvs, TransposedConvolutionLayer),
    nn.Embedding: EmbeddingLayer,
    nn.LayerNorm: LayerNormLayer,
    nn.RMSNorm: RMSNormLayer,
    nn.GroupNorm: GroupNormLayer,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), BatchNormLayer),
    nn.MultiheadAttention: ProjectionLayer,
    **dict.fromkeys((*Recurrent, *Cells), RecurrentLayer),
    nn.Bilinear: BilinearLayer,
    nn.EmbeddingBag: EmbeddingBagLayer,
}
#: Kinds from other libraries, by (part of) the class name; whether one really fits is tested by running its forward.
FOREIGN_KINDS: dict[str, type[Layer]] = {
    "Conv1D": Conv1DLayer,
    "RMSNorm": ForeignRMSNormLayer,
    "LayerNorm": ForeignRMSNormLayer,
    "Experts": ExpertsLayer,
    "Linear": ForeignLinearLayer,
}
#: For subclasses that override ``forward``: classes for those that still call the base's product, or an equal one.
OWN_FORWARD: dict[type[nn.Module], tuple[type[Layer], ...]] = {
    nn.Linear: (OwnForwardLinearLayer, ForeignLinearLayer),
    nn.Embedding: (OwnForwardEmbeddingLayer,),
}


def layer_class(module: nn.Module) -> type[Layer] | None:
    """Return the class that reads a module, or None if it cannot be read exactly."""
    for kind, cls in KINDS.items():
        if isinstance(module, kind) and type(module).forward is kind.forward and cls.supports(module):
            return cls
    if isinstance(module, tuple(KINDS)):
        own = (cls for kind, classes in OWN_FORWARD.items() if isinstance(module, kind) for cls in classes)
        return next((cls for cls in own if type(module) not in KINDS and cls.supports(module)), None)
    name = type(module).__name__
    return next((cls for part, cls in FOREIGN_KINDS.items() if part in name and cls.supports(module)), None)
