"""Other people's training loops, with the real libraries: they train, clip, accumulate and scale as they like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ekfac
from integrations.networks import LENGTH, VOCABULARY, gpt2


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.tokens = torch.randint(3, VOCABULARY, (32, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def arguments(folder: Path, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return transformers.TrainingArguments(
        str(folder),
        max_steps=8,
        per_device_train_batch_size=6,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        **options,
    )


def test_hugging_faces_trainer_clips_and_accumulates(tmp_path: Path) -> None:
    args = arguments(tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.1)
    from transformers import Trainer

    torch.manual_seed(0)
    model = gpt2()
    opt = ekfac.EKFAC(model, lr=3e-3)
    result = Trainer(model=model, args=args, train_dataset=Texts(), optimizers=(opt, None)).train()
    assert opt.stats()["steps"] == 8
    assert not opt.engine.collector.fingerprints.unverified  # clipping does not switch the check off
    assert result.training_loss < 4.3


def test_a_class_in_its_place_is_told_what_to_do(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    from transformers import Trainer

    trainer = Trainer(model=gpt2(), args=args, train_dataset=Texts(), optimizer_cls_and_kwargs=(ekfac.EKFAC, {}))
    with pytest.raises(
        TypeError, match=r"hand it over, as in Trainer\(optimizers=\(EKFAC\(model\), None\)\)"
    ) as caught:
        trainer.train()
    assert len(str(caught.value)) < 400


def test_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    x = torch.randn(64, 4)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), batch_size=16)
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    opt = ekfac.EKFAC(net, lr=1e-2)
    model, optimizer, batches = accelerator.prepare(net, opt, data)
    losses = []
    for _ in range(8):
        for inputs, labels in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    assert opt.stats()["steps"] == 16
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_lightning(precision: str, clip: float | None, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.Linear(4, 16), nn.Linear(16, 2)
            self.losses: list[float] = []

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.head(torch.tanh(self.encoder(batch[0]))), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            opt = ekfac.EKFAC(self, total_steps=self.trainer.estimated_stepping_batches)
            if precision == "16-mixed":
                opt.attach_scaler(self.trainer.precision_plugin.scaler)
            return opt

    torch.manual_seed(0)
    x = torch.randn(64, 4)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), batch_size=16)
    module, options = Module(), {"precision": precision}
    if precision == "16-mixed":
        from lightning.pytorch.plugins import MixedPrecision

        options = {"plugins": MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu"))}
    trainer = lightning.Trainer(
        max_epochs=10, logger=False, enable_checkpointing=False, enable_progress_bar=False, gradient_clip_val=clip,
        accelerator="cpu", default_root_dir=tmp_path, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, data)
    assert module.losses[-1] < 0.8 * module.losses[0]


def test_lightning_averages_weights(tmp_path: Path) -> None:
    """It ends with forwards alone, for batch-norm, and one more step on gradients that were used."""
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return ekfac.EKFAC(self)

    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = (x[:, 0] > 0).long()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=10, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        callbacks=StochasticWeightAveraging(1e-2), gradient_clip_val=1.0, default_root_dir=tmp_path,
        enable_model_summary=False,
    )  # fmt: skip
    with pytest.warns(RuntimeWarning, match="gradients that the last step used"):
        trainer.fit(module, data)
    module.eval()
    assert nn.functional.cross_entropy(module.net(x), y) < 0.3


@pytest.mark.parametrize("kind", ["PPO", "A2C", "DQN"])
def test_stable_baselines(kind: str) -> None:
    baselines = pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
    options: dict[str, dict[str, Any]] = {
        "PPO": {"n_steps": 64, "batch_size": 32, "n_epochs": 2},
        "A2C": {},
        "DQN": {"learning_starts": 20},
    }
    agent = getattr(baselines, kind)("MlpPolicy", "CartPole-v1", seed=0, device="cpu", **options[kind])
    model = agent.q_net if kind == "DQN" else agent.policy
    opt = agent.policy.optimizer = ekfac.EKFAC(model, lr=1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    agent.learn(128)
    assert opt.stats()["steps"] > 5
    assert not opt.engine.collector.fingerprints.unverified
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_opacus_makes_no_step_private() -> None:
    """It clips and adds noise to gradients, of which statistics are not made."""
    opacus = pytest.importorskip("opacus", reason="opacus is not installed")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    x = torch.randn(64, 4)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), batch_size=16)
    opt = ekfac.EKFAC(net)
    model, optimizer, batches = opacus.PrivacyEngine(accountant="rdp").make_private(
        module=net, optimizer=opt, data_loader=data, noise_multiplier=0.5, max_grad_norm=1.0
    )
    inputs, labels = next(iter(batches))
    nn.functional.cross_entropy(model(inputs), labels).backward()
    with pytest.warns(UserWarning, match="not differentially private"):
        optimizer.step()
    assert opt.stats()["steps"] == 1
