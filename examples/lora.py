"""Fine-tune with LoRA: a network trained on upright digits learns rotated ones through adapters of rank 4.

The adapters are two small `Linear` layers beside each frozen one, so EKFAC covers them as any other layer, peft's too.
"""

import copy
import math

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import ekfac
from ekfac.lab.data.datasets import load_dataset
from ekfac.lab.show.picture import COLOURS, label_ends, publish

STEPS, RANK = 120, 4


class LoRA(nn.Module):  # W x + b + up(down(x)), W and b frozen, `up` zero at the start
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, RANK, False), nn.Linear(RANK, base.out_features, False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def turned(pixels: Tensor, degrees: float) -> Tensor:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    images, turn = pixels.view(-1, 1, 28, 28), torch.tensor([[c, -s, 0.0], [s, c, 0.0]]).expand(len(pixels), 2, 3)
    images = F.grid_sample(images, F.affine_grid(turn, list(images.shape), align_corners=False), align_corners=False)
    return F.avg_pool2d(images, 2).flatten(1)


torch.manual_seed(0)
splits = load_dataset("mnist-5k").splits
(upright, labels), (held_out, truth) = splits["train"], splits["validation"]
test = turned(held_out, 60)
base = nn.Sequential(nn.Linear(196, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def train(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, steps: int) -> list[float]:
    """Accuracy on rotated digits that were held out, after every ten steps."""
    batches, found = torch.Generator().manual_seed(0), []
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, opt.param_groups[0]["lr"], steps, pct_start=0.2)
    for step in range(1, steps + 1):
        index = torch.randint(len(x), (64,), generator=batches)
        opt.zero_grad()
        F.cross_entropy(model(x[index]), labels[index]).backward()
        opt.step()
        schedule.step()
        if step % 10 == 0:
            found.append((model(test).argmax(1) == truth).float().mean().item())
    return found


before = train(base, torch.optim.Adam(base.parameters(), lr=2e-3), turned(upright, 0), 300)[-1]
curves = {}
for name in ("AdamW", "EKFAC"):
    torch.manual_seed(1)
    model = nn.Sequential(*(LoRA(m) if isinstance(m, nn.Linear) else m for m in copy.deepcopy(base)))
    opt = ekfac.EKFAC(model, lr=1e-2) if name == "EKFAC" else torch.optim.AdamW(model.parameters(), lr=1e-2)
    curves[name] = [before, *train(model, opt, turned(upright, 60), STEPS)]
    print(f"{name}: accuracy on rotated digits {before:.1%} before, {curves[name][-1]:.1%} after {STEPS} steps")


def draw(figure: Figure) -> None:
    axes = figure.subplots()
    for name, values in curves.items():
        axes.plot(range(0, STEPS + 1, 10), values, color=COLOURS[name], label=name)
    axes.set(xlabel="step of fine-tuning", ylabel="accuracy", title="With LoRA, a network learns rotated digits")
    label_ends(axes, numbers=".1%")


publish("lora", draw, {"before": before, **{name: values[-1] for name, values in curves.items()}})
