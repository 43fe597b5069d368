"""Train a convolutional network on 200 digits, with random shifts and rotations of the images, and without."""

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import ekfac
from ekfac.lab.data.datasets import load_dataset
from ekfac.lab.show.picture import label_ends, publish

EPOCHS, BATCH = 40, 50
splits = load_dataset("mnist-5k").splits
(pixels, y), (held_out, truth) = splits["train"], splits["validation"]
pixels, y = F.avg_pool2d(pixels[:200].view(-1, 1, 28, 28), 2), y[:200]
test = F.avg_pool2d(held_out.view(-1, 1, 28, 28), 2)


def augmented(images: Tensor) -> Tensor:
    """Rotate each image by up to 15 degrees and shift it by up to a tenth of its width."""
    angle, shift = torch.rand(len(images)) * 0.52 - 0.26, torch.rand(len(images), 2) * 0.4 - 0.2
    rows = [torch.stack([angle.cos(), -angle.sin(), shift[:, 0]], 1)]
    rows += [torch.stack([angle.sin(), angle.cos(), shift[:, 1]], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def train(augment: bool) -> list[float]:
    """Held-out accuracy after each epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 9, 10),
    )  # fmt: skip
    opt = ekfac.EKFAC(model, total_steps=EPOCHS * len(pixels) // BATCH)
    accuracy = []
    for _ in range(EPOCHS):
        model.train()
        for index in torch.randperm(len(pixels)).split(BATCH):
            opt.zero_grad()
            images = augmented(pixels[index]) if augment else pixels[index]
            F.cross_entropy(model(images), y[index]).backward()
            opt.step()
        with torch.no_grad():
            accuracy.append((model.eval()(test).argmax(1) == truth).float().mean().item())
    return accuracy


curves = {name: train(augment) for name, augment in (("augmented", True), ("as they are", False))}
for name, values in curves.items():
    print(f"images {name}: held-out accuracy {values[-1]:.1%} after {EPOCHS} epochs")


def draw(figure: Figure) -> None:
    axes = figure.subplots()
    for (name, values), colour in zip(curves.items(), ("C0", "C7"), strict=True):
        axes.plot(range(1, EPOCHS + 1), values, color=colour, label=name)
    axes.set(xlabel="epoch", ylabel="held-out accuracy", ylim=(0.7, 1.0), xticks=(1, 10, 20, 30, 40))
    axes.set_title("200 digits: shifting and rotating the images lifts accuracy")
    label_ends(axes, numbers=".1%")


publish("augment", draw, {name: values[-1] for name, values in curves.items()})
