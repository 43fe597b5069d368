"""How approximations of the Fisher degrade between updates of their basis, measured while a network trains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ekfac.lab.show.figures.base import Request
from ekfac.lab.show.figures.measure import Subject, flat_spectrum, second_moments

# The library's values, for EKFAC-ra's running average and for the damping in the angles.
DECAY = 0.95
DAMPING = 1e-3
# Steps of training, steps between measurements, examples to measure on.
QUICK_ERRORS = (200, 10, 250)
ERRORS = (500, 10, 1000)


@dataclass(frozen=True)
class Drift:
    """Distances measured at some steps of training, for each approximation.

    Attributes:
        steps: The steps.
        distances: The distances, by approximation.
        norms: The norm of the exact quantity, if it was measured too.
    """

    steps: list[int]
    distances: Mapping[str, list[float]]
    norms: Sequence[float] = ()


def errors(request: Request, renew_every: int = 100) -> tuple[Drift, Drift]:
    """Measure the classifier's approximations against its empirical Fisher, block by block, over training.

    The basis (and KFAC's eigenvalues) is updated every ``renew_every`` steps; EKFAC computes s* at every step. With U
    the basis, s the eigenvalues in use and s* = diag(U^T G U),

        ||G - U diag(s) U^T||^2 = ||G||^2 - 2 s . s* + ||s||^2.

    Returns:
        The relative Frobenius errors ||G - G^|| / ||G||, and the angles in degrees between G^^-1 g and G^-1 g, with
        equal damping, where g is the mean gradient.
    """
    subject = Subject("classifier", request)
    layers = [subject.layer(number) for number in range(1, 6)]
    total, stride, examples = QUICK_ERRORS if request.quick else ERRORS
    sample = subject.sample(examples)
    steps: list[int] = []
    error: dict[str, list[float]] = {"KFAC": [], "EKFAC": []}
    angle: dict[str, list[float]] = {"KFAC": [], "EKFAC": []}
    kfac = subject.fisher("kfac", sample, layers)
    for step in range(total + 1):
        if step and step % renew_every == 0:
            kfac = subject.fisher("kfac", sample, layers)
        if step % stride == 0:
            G = subject.fisher("block", sample, layers)
            gradients = subject.gradients(layers, sample)
            s, s_star = flat_spectrum(kfac), second_moments(kfac, gradients)
            norm, mean = float(G.norm()), gradients.mean(0)
            exact = G.solve(mean, DAMPING)
            steps.append(step)
            for name, values in (("KFAC", s), ("EKFAC", s_star)):
                error[name].append(frobenius(norm, values, s_star))
                step_direction = kfac.unproject(kfac.project(mean) / (values + DAMPING))
                angle[name].append(_degrees(step_direction, exact))
        subject.steps(1)
    return Drift(steps, error), Drift(steps, angle)


def frobenius(norm: float, s: Tensor, s_star: Tensor) -> float:
    """Return ||G - U diag(s) U^T|| / ||G|| from ||G|| and s* = diag(U^T G U)."""
    s, s_star = s.double(), s_star.double()
    distance = norm**2 - 2 * float(s @ s_star) + float(s @ s)
    return math.sqrt(max(distance, 0.0)) / norm


def _degrees(v: Tensor, w: Tensor) -> float:
    cosine = torch.nn.functional.cosine_similarity(v.double(), w.double(), dim=0)
    return math.degrees(math.acos(float(cosine.clamp(-1, 1))))


def spectra(request: Request) -> Drift:
    """Measure the distance of the approximations' spectra from that of G, in the auto-encoder's 4th layer.

    The basis and KFAC's eigenvalues are those of the start throughout. EKFAC computes s* from each batch. EKFAC-ra
    keeps a running average of N g^2 that starts at KFAC's eigenvalues, with g the batch's mean gradient in the basis.
    """
    subject = Subject("autoencoder", request, lr=1e-3)
    total, stride, examples = (100, 10, 300) if request.quick else (500, 10, 1000)
    layers = [subject.layer(4)]
    sample = subject.sample(examples)
    kfac = subject.fisher("kfac", sample, layers)
    fixed = flat_spectrum(kfac)
    running = fixed.clone()
    steps: list[int] = []
    norms: list[float] = []
    found: dict[str, list[float]] = {"KFAC": [], "EKFAC": [], "EKFAC-ra": []}
    for step in range(total + 1):
        batch = subject.batch()
        subject.backward(batch)
        g = kfac.project(subject.mean_gradient(layers))
        running = DECAY * running + (1 - DECAY) * len(batch.x) * g.square()
        if step % stride == 0:
            G = subject.fisher("block", sample, layers).eigenvalues().double()
            s_star = second_moments(kfac, subject.gradients(layers, batch))
            steps.append(step)
            norms.append(float(G.norm()))
            for name, s in (("KFAC", fixed), ("EKFAC", s_star), ("EKFAC-ra", running)):
                found[name].append(float((G - s.double().sort().values).norm()))
        subject.update()
    return Drift(steps, found, norms)
