"""Statistics of the true Fisher: labels drawn from the model's own predictions, in place of the given ones."""

import torch
from torch import nn

from ekfac import EKFAC, rules

torch.manual_seed(0)
x = torch.randn(512, 20)
y = x[:, :4].argmax(1)
model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 4))
rule = rules.PerExample(decay=0.9)
optimizer = EKFAC(model, lr=0.05, scaling=rule, damping=1e-2, damping_mode="plain", refresh_every=10)

for step in range(60):
    index = torch.randint(len(x), (128,))
    optimizer.zero_grad()
    logits = model(x[index])
    drawn = torch.distributions.Categorical(logits=logits.detach()).sample()
    with optimizer.statistics():  # factors and s* come from this backward pass, .grad does not
        nn.functional.cross_entropy(logits, drawn).backward(retain_graph=True)
    loss = nn.functional.cross_entropy(logits, y[index])
    loss.backward()
    optimizer.step()
    if step % 15 == 14:
        print(f"step {step + 1}: loss {loss.item():.4f}")
