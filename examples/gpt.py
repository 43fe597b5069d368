"""Train a small GPT on the characters of Python's own library, by AdamW and by EKFAC, with the same schedule."""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import ekfac
from ekfac.lab.show.picture import COLOURS, label_ends, publish

CONTEXT, WIDTH, STEPS, BATCH = 64, 64, 100, 16
text = torch.tensor(list(Path(argparse.__file__).read_bytes())) % 128
train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(x) + self.places(torch.arange(x.shape[1]))))


def loss_of(model: nn.Module, data: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    rows = data[torch.randint(len(data) - CONTEXT - 1, (batch, 1), generator=generator) + torch.arange(CONTEXT + 1)]
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


curves: dict[str, list[float]] = {}
for name in ("AdamW", "EKFAC"):
    torch.manual_seed(0)
    batches = torch.Generator().manual_seed(0)
    model = GPT()
    if name == "AdamW":
        opt: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    else:
        opt = ekfac.EKFAC(model, lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, opt.param_groups[0]["lr"], STEPS, pct_start=0.2)
    for step in range(1, STEPS + 1):
        opt.zero_grad()
        loss_of(model, train, BATCH, batches).backward()
        opt.step()
        schedule.step()
        if step % 10 == 0:
            with torch.no_grad():
                loss = loss_of(model, held_out, 64, torch.Generator().manual_seed(1))
            curves.setdefault(name, []).append(loss.item())
    print(f"{name}: held-out loss {loss:.3f} after {STEPS} steps")


def draw(figure: Figure) -> None:
    axes = figure.subplots()
    for name, values in curves.items():
        axes.plot(range(10, STEPS + 1, 10), values, color=COLOURS[name], label=name)
    best = min(curves, key=lambda name: curves[name][-1])
    axes.set(xlabel="step", ylabel="held-out loss", title=f"A small GPT on Python source: {best} ends lower")
    label_ends(axes, numbers=".2f")


publish("gpt", draw, {name: values[-1] for name, values in curves.items()})
