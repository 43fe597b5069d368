"""The equations of the authors' own code for Linear layers, written afresh, against the optimizer over many steps.

Theirs, for a layer with input x (a column of ones appended) and output gradient gy of the mean loss over N examples:

    refresh:  d_x, U_x = eigh(x^T x / N)        d_g, U_g = eigh((N gy)^T (N gy) / N)        m2 = d_g d_x^T
    running:  g = U_g^T grad U_x        m2 <- alpha m2 + (1 - alpha) N g^2        grad <- U_g (g / (m2 + eps)) U_x^T
    intra:    m2 = ((N gy U_g)^2)^T ((x U_x)^2) / N of this batch        grad <- U_g (g / (m2 + eps)) U_x^T
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paper import EKFAC, Preconditioner

ALPHA, EPS, LR, REFRESH, N = 0.75, 0.02, 0.1, 3, 40


class Authors:
    """Their preconditioner as the equations above say; it changes ``.grad`` in place."""

    def __init__(self, model: nn.Module, running: bool) -> None:
        self.running = running
        self.steps = 0
        self.layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        self.seen: dict[nn.Module, dict[str, Tensor]] = {m: {} for m in self.layers}
        for m in self.layers:
            m.register_forward_pre_hook(lambda m, args: self.seen[m].update(x=args[0].detach()))
            m.register_full_backward_hook(lambda m, _, out: self.seen[m].update(gy=out[0] * out[0].shape[0]))

    def step(self) -> None:
        for m in self.layers:
            state = self.seen[m]
            x, gy = state["x"], state["gy"]
            n = len(x)
            x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
            if self.steps % REFRESH == 0:
                d_x, state["U_x"] = torch.linalg.eigh(x.T @ x / n)
                d_g, state["U_g"] = torch.linalg.eigh(gy.T @ gy / n)
                state["m2"] = torch.outer(d_g, d_x)
            grad = torch.cat([m.weight.grad, m.bias.grad[:, None]], 1)
            g = state["U_g"].T @ grad @ state["U_x"]
            if self.running:
                state["m2"] = ALPHA * state["m2"] + (1 - ALPHA) * n * g**2
            else:
                state["m2"] = ((gy @ state["U_g"]) ** 2).T @ ((x @ state["U_x"]) ** 2) / n
            natural = state["U_g"] @ (g / (state["m2"] + EPS)) @ state["U_x"].T
            m.weight.grad.copy_(natural[:, :-1])
            m.bias.grad.copy_(natural[:, -1])
        self.steps += 1


def ours(model: nn.Module, kind: Any, running: bool, **options: Any) -> Any:
    return kind(
        model,
        scaling="running" if running else "per_example",
        scaling_decay=ALPHA if running else 0.0,
        damping=EPS,
        refresh_every=REFRESH,
        factor_decay=0.0,
        on_refresh="kronecker",
        **options,
    )


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("through", ["optimizer", "preconditioner"])
def test_linear_layers_follow_the_authors_equations(through: str, running: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    twin = copy.deepcopy(model)
    authors = Authors(twin, running)
    sgd = torch.optim.SGD(twin.parameters(), lr=LR, momentum=0.5)
    if through == "optimizer":
        opt = ours(model, EKFAC, running, lr=LR, momentum=0.5)
    else:
        opt = ours(model, Preconditioner, running)
        then = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
    for _ in range(3 * REFRESH + 2):
        x, y = torch.randn(N, 5, dtype=torch.float64), torch.randint(4, (N,))
        for net, optimizer in ((model, opt), (twin, sgd)):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
        opt.step()
        authors.step()
        if through == "preconditioner":
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-10)
            then.step()
        sgd.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)
        for layer, state in zip((m for m in model if isinstance(m, nn.Linear)), authors.seen.values(), strict=True):
            torch.testing.assert_close(opt.state[layer.weight]["s"][0], state["m2"], rtol=1e-7, atol=1e-10)
