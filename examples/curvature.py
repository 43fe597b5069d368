"""How far each approximation of the Fisher is from the full matrix, on a small classifier."""

import torch
from torch import nn

import ekfac

torch.manual_seed(0)
x = torch.randn(200, 6).double()
y = x[:, :3].argmax(1)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
optimizer = ekfac.EKFAC(model, refresh_every=5)
for _ in range(20):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()

full = ekfac.fisher(model, [(x, y)], "categorical", approximation="full", estimate="exact")
print(f"{'':10}{'trace':>10}{'relative error':>16}{'spectrum distance':>19}")
for name in ("full", "block", "ekfac", "kfac", "diagonal"):
    G = ekfac.fisher(model, [(x, y)], "categorical", approximation=name, estimate="exact")
    error, distance = ekfac.relative_error(full, G), ekfac.spectrum_distance(full, G)
    print(f"{name:10}{G.trace():10.4f}{error:16.4f}{distance:19.4f}")

v = {name: p.detach() for name, p in model.named_parameters()}
print("w^T G w of the weights:", float(full.quadratic(v)))
