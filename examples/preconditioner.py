"""Keep your own optimizer: precondition the gradient first, then let AdamW or SGD take the step."""

import torch
from torch import nn

from ekfac import Coverage, Preconditioner

torch.manual_seed(0)
x = torch.randn(512, 3, 8, 8)
y = (x.mean((1, 2, 3)) > 0).long()
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 64, 2))

coverage = Coverage(sua=True)
preconditioner = Preconditioner(model, scaling="running", damping=1e-2, refresh_every=10, coverage=coverage)
sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=40)

for step in range(40):
    index = torch.randint(len(x), (64,))
    sgd.zero_grad()
    loss = nn.functional.cross_entropy(model(x[index]), y[index])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)  # what is clipped is what is preconditioned
    preconditioner.step()  # .grad is now the preconditioned gradient
    sgd.step()
    schedule.step()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.4f}")
