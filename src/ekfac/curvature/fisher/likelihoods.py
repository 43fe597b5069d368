"""Distributions of the label given a model's output: categorical, Bernoulli, Gaussian; and plain loss functions.

Every estimate of the Fisher is a list of gradients with respect to the model's output f. With g_n the gradient of
example n's loss, G = mean over n of E[g_n g_n^T], where the expectation is over

* ``empirical``: the given label: one gradient;
* ``sampled``: k labels drawn from the model: k gradients, each divided by sqrt(k);
* ``exact``: all labels: the columns of a square root of the output's covariance. An example with several independent
  terms (pixels, tokens) needs the columns of each term separately: gradients of different terms have mean zero and are
  independent, so there are no cross terms.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Likelihood(ABC):
    """A distribution of labels given the model's output; the loss is its negative logarithm.

    Args:
        mean: Whether an example's terms are averaged, as in torch's losses, rather than summed.
    """

    name: str

    def __init__(self, *, mean: bool = False) -> None:
        self.mean = mean

    @abstractmethod
    def check(self, output: Tensor, target: Tensor) -> None:
        """Raise if the labels do not fit the output."""

    @abstractmethod
    def gradient(self, output: Tensor, target: Tensor, n: int) -> Tensor:
        """Return the gradient of the sum of l_n for the given labels, shaped like the output."""

    def live_terms(self, output: Tensor, target: Any) -> Tensor | None:
        """Return a mask of the terms with a loss, according to the target; None if all have one."""
        return None

    @abstractmethod
    def draw(self, output: Tensor, live: Tensor | None, n: int, generator: torch.Generator) -> Tensor:
        """Draw labels from the model and return the gradient of the sum of l_n, shaped like the output."""

    @abstractmethod
    def columns(self, output: Tensor, live: Tensor | None, n: int) -> Iterator[Tensor]:
        """Yield tensors like the output whose outer products sum, for each example, to E[g_n g_n^T]."""


class Categorical(Likelihood):
    """Logits of C classes.

    Args:
        class_dim: The dimension of the classes: -1, as in ``torch.distributions``, or 1, as in ``CrossEntropyLoss``.
        mean: Average over the batch's terms instead of summing over an example's.
        ignore_index: The label of terms without a loss.
    """

    name = "categorical"

    def __init__(self, class_dim: int = -1, *, mean: bool = False, ignore_index: int = -100) -> None:
        super().__init__(mean=mean)
        self.class_dim = class_dim
        self.ignore_index = ignore_index

    def check(self, output: Tensor, target: Tensor) -> None:
        logits = self._classes_last(output)
        if target.is_floating_point():
            if target.shape != output.shape:
                raise ValueError(_misfit("class probabilities", target, tuple(output.shape), output))
            return
        if target.shape != logits.shape[:-1]:
            raise ValueError(_misfit("class labels", target, tuple(logits.shape[:-1]), output))
        smallest, largest = target.aminmax()
        if int(smallest) >= 0 and int(largest) < logits.shape[-1]:
            return
        wrong = target[((target < 0) | (target >= logits.shape[-1])) & (target != self.ignore_index)]
        if wrong.numel():
            raise ValueError(
                f"label {int(wrong[0])} is out of range: the model's output has {logits.shape[-1]} classes, so labels "
                f"must be 0 to {logits.shape[-1] - 1} (or {self.ignore_index} for a term without a loss)"
            )

    def gradient(self, output: Tensor, target: Tensor, n: int) -> Tensor:
        p = self._classes_last(output).softmax(-1)
        weight = self._weight(output, self.live_terms(output, target), n)
        if target.is_floating_point():
            q = self._classes_last(target).to(p)
            return self._classes_back(p * q.sum(-1, keepdim=True) - q) * weight
        live = (target != self.ignore_index)[..., None]
        gradient = p.scatter_add(-1, torch.where(live, target[..., None], 0), p.new_full((), -1.0).expand_as(live))
        return self._classes_back(gradient * live) * weight

    def live_terms(self, output: Tensor, target: Any) -> Tensor | None:
        if not isinstance(target, Tensor) or target.is_floating_point():
            return None
        return target != self.ignore_index if target.shape == self._classes_last(output).shape[:-1] else None

    def draw(self, output: Tensor, live: Tensor | None, n: int, generator: torch.Generator) -> Tensor:
        p = self._classes_last(output).softmax(-1)
        labels = torch.multinomial(p.flatten(0, -2).float(), 1, generator=generator).reshape(p.shape[:-1])
        gradient = self._classes_back(self._masked(p - F.one_hot(labels, p.shape[-1]), live))
        return gradient * self._weight(output, live, n)

    def columns(self, output: Tensor, live: Tensor | None, n: int) -> Iterator[Tensor]:
        log_p = self._classes_last(output).log_softmax(-1)
        weight = self._weight(output, live, n)
        for k in range(log_p.shape[-1] - 1):
            column = self._masked(covariance_column(log_p, k), live) * weight
            for alone in _term_by_term(column, column.reshape(n, -1, log_p.shape[-1])):
                yield self._classes_back(alone)

    def _classes_last(self, tensor: Tensor) -> Tensor:
        return tensor.movedim(self.class_dim, -1)

    def _classes_back(self, tensor: Tensor) -> Tensor:
        return tensor.movedim(-1, self.class_dim)

    def _masked(self, gradient: Tensor, live: Tensor | None) -> Tensor:
        return gradient if live is None else gradient * live[..., None]

    def _weight(self, output: Tensor, live: Tensor | None, n: int) -> float:
        """Return N times a term's weight in the loss."""
        if not self.mean:
            return 1.0
        return n * output.shape[self.class_dim] / output.numel() if live is None else n / max(1, int(live.sum()))


def covariance_column(log_p: Tensor, k: int) -> Tensor:
    """Return column k of the C - 1 columns of the Cholesky factor of diag(p) - p p^T, along the last dimension.

    Each column decides between class k and those after it. With t_k = p_k+1 + ... + p_C, the column is 0 above k,
    sqrt(p_k t_k / t_k-1) at k, and -p_j / t_k times that below. Everything is computed from logarithms, because the
    t_k of a confident network are tiny.
    """
    log_p = log_p.clamp(min=-1e4)  # masked classes have log p = -inf, whose differences are undefined
    after = log_p[..., k + 1 :].logsumexp(-1, keepdim=True)
    here = log_p[..., k : k + 1]
    head = (0.5 * (here + after - torch.logaddexp(here, after))).exp()
    column = torch.zeros_like(log_p)
    column[..., k : k + 1] = head
    column[..., k + 1 :] = -(log_p[..., k + 1 :] - after).exp() * head
    return column


class Bernoulli(Likelihood):
    """Independent logits, each of which is a term."""

    name = "bernoulli"

    def check(self, output: Tensor, target: Tensor) -> None:
        if target.shape != output.shape:
            raise ValueError(_misfit("labels", target, tuple(output.shape), output))
        wrong = target[(target < 0) | (target > 1)]
        if wrong.numel():
            raise ValueError(f"label {float(wrong[0]):g} is out of range: bernoulli labels must lie between 0 and 1")

    def gradient(self, output: Tensor, target: Tensor, n: int) -> Tensor:
        return (output.sigmoid() - target.to(output)) * self._weight(output, n)

    def draw(self, output: Tensor, live: Tensor | None, n: int, generator: torch.Generator) -> Tensor:
        p = output.sigmoid()
        return (p - torch.bernoulli(p, generator=generator)) * self._weight(output, n)

    def columns(self, output: Tensor, live: Tensor | None, n: int) -> Iterator[Tensor]:
        # p (1 - p) as a product of two sigmoids is accurate even for p near 1.
        root = (output.sigmoid() * (-output).sigmoid()).sqrt() * self._weight(output, n)
        return _term_by_term(root, root.reshape(n, -1, 1))

    def _weight(self, output: Tensor, n: int) -> float:
        return n / output.numel() if self.mean else 1.0


class Gaussian(Likelihood):
    """A mean with independent noise of precision tau: l_n = tau/2 ||f_n - y_n||^2.

    Args:
        precision: tau; 1 for the likelihood's name, 2 for ``MSELoss(reduction="sum")``.
        mean: Divide tau by the number of outputs of an example, as ``MSELoss(reduction="mean")`` does.
    """

    name = "gaussian"

    def __init__(self, precision: float = 1.0, *, mean: bool = False) -> None:
        super().__init__(mean=mean)
        self.precision = precision

    def check(self, output: Tensor, target: Tensor) -> None:
        if target.shape != output.shape:
            raise ValueError(_misfit("targets", target, tuple(output.shape), output))

    def gradient(self, output: Tensor, target: Tensor, n: int) -> Tensor:
        return (output - target.to(output)) * self._tau(output, n)

    def draw(self, output: Tensor, live: Tensor | None, n: int, generator: torch.Generator) -> Tensor:
        noise = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
        return noise * math.sqrt(self._tau(output, n))

    def columns(self, output: Tensor, live: Tensor | None, n: int) -> Iterator[Tensor]:
        root = torch.full_like(output, math.sqrt(self._tau(output, n)))
        return _term_by_term(root, root.reshape(n, -1, 1))

    def _tau(self, output: Tensor, n: int) -> float:
        return self.precision * (n / output.numel() if self.mean else 1.0)


def _term_by_term(whole: Tensor, by_term: Tensor) -> Iterator[Tensor]:
    """Yield the tensor with all terms but one set to zero; ``by_term`` is a view ``[n, terms, outputs]``."""
    if by_term.shape[1] == 1:
        yield whole
        return
    for t in range(by_term.shape[1]):
        alone = torch.zeros_like(by_term)
        alone[:, t] = by_term[:, t]
        yield alone.reshape(whole.shape)


def _misfit(what: str, target: Tensor, expected: tuple[int, ...], output: Tensor) -> str:
    return (
        f"{what} of shape {tuple(target.shape)} do not fit the model's output of shape {tuple(output.shape)}: "
        f"expected shape {expected}"
    )


LIKELIHOODS: dict[str, type[Likelihood]] = {
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
}

Loss = str | nn.Module | Callable[[Any, Any], Tensor]


def likelihood_of(loss: Loss) -> Likelihood | None:
    """Return the likelihood of a name or one of torch's losses; None for any other function."""
    if isinstance(loss, str):
        if loss not in LIKELIHOODS:
            known = ", ".join(map(repr, LIKELIHOODS))
            raise ValueError(f"loss={loss!r} is not known. Allowed: {known}, torch's losses, or a function")
        return LIKELIHOODS[loss]()
    mean = getattr(loss, "reduction", "") == "mean"
    if type(loss) is nn.CrossEntropyLoss and loss.weight is None and not loss.label_smoothing:
        return Categorical(1, mean=mean, ignore_index=loss.ignore_index)
    if type(loss) is nn.BCEWithLogitsLoss and loss.weight is None and loss.pos_weight is None:
        return Bernoulli(mean=mean)
    if type(loss) is nn.MSELoss:
        return Gaussian(2.0, mean=mean)
    if not callable(loss):
        raise TypeError(
            f"loss={loss!r} must be a function of (output, target), the name of a likelihood, or one of torch's losses"
        )
    return None
