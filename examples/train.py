"""Train a small network with EKFAC in place of Adam: ten lines."""

import torch
from torch import nn

from ekfac import EKFAC

torch.manual_seed(0)
x = torch.randn(512, 20)
y = (x[:, :3].sum(1) > 0).long()
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 2))

optimizer = EKFAC(model)
for epoch in range(10):
    for index in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[index]), y[index])
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}")

print(optimizer.summary())
print(optimizer.stats())
