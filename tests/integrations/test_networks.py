"""Networks of other libraries train as they come, and are covered; what comes of it makes the page docs/works.md."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ekfac import EKFAC, StepSize
from integrations.networks import LENGTH, NETWORKS, VOCABULARY, gpt2, language

STEPS = 60
#: Where results are written, one line a network; see page.py.
RECORD = os.environ.get("EKFAC_MATRIX")


def batches(steps: int) -> Iterator[Tensor]:
    """Batches of eight, and now and then a short one."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(3, VOCABULARY, (32, LENGTH), generator=generator)
    for i in range(steps):
        yield texts[torch.randint(0, 32, (8 if i % 7 else 5,), generator=generator)]


def trained(model: nn.Module, opt: torch.optim.Optimizer, name: str, steps: int = STEPS) -> list[float]:
    losses = []
    for tokens in batches(steps):
        opt.zero_grad()
        value = NETWORKS[name].loss(model, tokens)
        value.backward()
        opt.step()
        losses.append(value.item())
    return losses


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name].build()


@pytest.mark.parametrize("name", NETWORKS)
def test_it_trains_as_it_comes(name: str) -> None:
    network = NETWORKS[name]
    package = pytest.importorskip(network.package, reason=f"{network.package} is not installed")
    model = built(name)
    opt = EKFAC(model, total_steps=STEPS, step_size=StepSize(decay_steps=None), **network.options())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no Kronecker.*")
        losses = trained(model, opt, name)
    rows = opt.summary().rows  # by now it is known which layers are called
    covered = sum(row.numbers for row in rows if not row.block.startswith("diagonal")) / sum(
        row.numbers for row in rows
    )
    assert covered >= network.least, opt.summary()
    first, last = (sum(part) / 5 for part in (losses[:5], losses[-5:]))
    assert last < first
    if RECORD:
        ends = []
        for lr in (3e-4, 1e-3, 3e-3):
            model = built(name)
            adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
            ends.append(sum(trained(model, adamw, name)[-5:]) / 5)
        row = {
            "network": name, "package": f"{network.package} {package.__version__}", "covered": covered, "first": first,
            "ekfac": last, "adamw": min(ends),
        }  # fmt: skip
        with Path(RECORD).open("a") as file:
            file.write(json.dumps(row) + "\n")


def test_lora_needs_nothing_set() -> None:
    """After 150 steps at or below AdamW's best of three rates; the weights of the adapters start at zero."""
    pytest.importorskip("peft", reason="peft is not installed")
    model = built("LoRA on Llama")
    ours = sum(trained(model, EKFAC(model), "LoRA on Llama", 150)[-10:]) / 10
    for lr in (3e-4, 1e-3, 3e-3):
        model = built("LoRA on Llama")
        adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
        assert ours <= sum(trained(model, adamw, "LoRA on Llama", 150)[-10:]) / 10


@pytest.mark.parametrize("config", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_tuning_a_prompt_alone(config: str) -> None:
    """Its positions belong to no example of the batch; the network itself is frozen."""
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def build() -> nn.Module:
        torch.manual_seed(0)
        task = getattr(peft, config)(task_type="CAUSAL_LM", num_virtual_tokens=4)
        return peft.get_peft_model(gpt2(), task)

    def end(model: nn.Module, opt: torch.optim.Optimizer) -> tuple[float, float]:
        losses = trained(model, opt, "GPT-2", 150)
        return sum(losses[:10]) / 10, sum(losses[-10:]) / 10

    model = build()
    first, last = end(model, EKFAC(model))
    assert last < first
    model = build()
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    assert last <= 1.01 * end(model, adamw)[1]


def test_a_layer_of_no_examples_is_refused_where_each_ones_gradient_is_needed() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    model = gpt2()
    with EKFAC(model, lr=1e-3, scaling="per_example"), pytest.raises(ValueError, match=r"wpe.*\(1, 12\)"):
        language(model, next(batches(1)))


def test_every_package_of_the_matrix_is_pinned() -> None:
    pinned = (Path(__file__).parents[2] / "requirements-integrations.txt").read_text().replace("-", "_").lower()
    for network in NETWORKS.values():
        assert f"\n{network.package}==" in pinned
