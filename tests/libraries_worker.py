"""What each rank does in test_sharded_libraries.py: a tiny Llama under fully_shard, Accelerate and Lightning.

Every training writes its losses, whole parameters, and what its optimizer has done into the folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

import ekfac

VOCABULARY, STEPS = 32, 10


def llama(tied: bool = False) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def tokens(step: int, rank: int = 0, world: int = 1) -> Tensor:
    """Counting up, from somewhere."""
    start = torch.randint(VOCABULARY, (8, 1), generator=torch.Generator().manual_seed(step))
    return ((start + torch.arange(10)) % VOCABULARY).chunk(world)[rank]


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in model.named_parameters()
    }


def optimizer(model: nn.Module) -> ekfac.EKFAC:
    """What shows the average of the weights, but does not divide rounding errors by themselves, as the default does."""
    return ekfac.EKFAC(
        model, scaling="running", damping_mode="plain", damping=1e-2, lr=0.02, weight_decay=0.0, refresh_every=4,
        step_size=ekfac.StepSize(average=True),
    )  # fmt: skip


def train(model: nn.Module, opt: Any, rank: int = 0, world: int = 1) -> list[float]:
    losses = []
    for step in range(STEPS):
        x = tokens(step, rank, world)
        opt.zero_grad()
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        losses.append(loss.item())
    return losses


def result(model: nn.Module, opt: Any, losses: list[float]) -> dict[str, Any]:
    opt = getattr(opt, "optimizer", opt)
    sharded = all(hasattr(p, "device_mesh") for p in opt.param_groups[0]["params"])
    assert opt.average.offsets
    return {"losses": losses, "model": whole(model), "covered": len(opt.engine.partition.covered),
            "steps": opt.stats()["steps"], "sharded": sharded}  # fmt: skip


def fully_sharded(rank: int, world: int, tied: bool = False) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model: Any = llama(tied)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = optimizer(model)
    return result(model, opt, train(model, opt, rank, world))


def tied(rank: int, world: int) -> dict[str, Any]:
    """An embedding that is also the head, beside the same with whole parameters on every rank.

    The scales of its two uses are balanced by what each rank sees, so that one process is not the measure.
    """
    model: Any = llama(tied=True)
    replicas = nn.parallel.DistributedDataParallel(model)
    opt = optimizer(model)
    train(replicas, opt, rank, world)
    return {**fully_sharded(rank, world, tied=True), "replicas": whole(model)}


def accelerate(rank: int, world: int) -> dict[str, Any]:
    """The optimizer is made before Accelerate shards the model."""
    accelerator, _ = accelerated()
    model = llama()
    model, opt = accelerator.prepare(model, optimizer(model))
    return result(model, opt, steps(accelerator, model, opt, range(STEPS), rank, world))


def accelerated(state_dict_type: str | None = None) -> tuple[Any, Any]:
    """An accelerator and its FSDP2 plugin."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False, state_dict_type=state_dict_type,
    )  # fmt: skip
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # Accelerate looks at the plugin on accelerators only; what follows it does in the same way on a CPU.
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    return accelerator, plugin


def steps(accelerator: Any, model: Any, opt: Any, numbers: range, rank: int, world: int) -> list[float]:
    losses = []
    for step in numbers:
        x = tokens(step, rank, world)
        opt.zero_grad()
        loss = model(input_ids=x, labels=x).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        losses.append(loss.item())
    return losses


def accelerate_resumed(rank: int, world: int) -> dict[str, Any]:
    """Half of the training is saved by Accelerate, and a new model and optimizer go on from there."""
    from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer

    accelerator, plugin = accelerated("SHARDED_STATE_DICT")
    folder = sys.argv[2]
    model = llama()
    model, opt = accelerator.prepare(model, optimizer(model))
    steps(accelerator, model, opt, range(STEPS // 2), rank, world)
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, opt, model, folder)
    accelerator, plugin = accelerated("SHARDED_STATE_DICT")
    model = llama()
    model, opt = accelerator.prepare(model, optimizer(model))
    nn.init.zeros_(next(model.parameters()))
    load_fsdp_model(plugin, accelerator, model, folder)
    load_fsdp_optimizer(plugin, accelerator, opt, model, folder)
    losses = steps(accelerator, model, opt, range(STEPS // 2, STEPS), rank, world)
    return result(model, opt, losses)


def lightning(rank: int, world: int) -> dict[str, Any]:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = llama()
            self.losses: list[float] = []

        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

        def configure_optimizers(self) -> Any:
            return optimizer(self.model)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            x = tokens(index, rank, world)
            loss = self.model(input_ids=x, labels=x).loss
            self.losses.append(loss.item())
            return loss

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(STEPS * world, 1)))

    module = Module()
    strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, max_steps=STEPS, logger=False, barebones=True,
    )  # fmt: skip
    trainer.fit(module)
    return result(module.model, trainer.optimizers[0], module.losses)


if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if name not in ("accelerate", "accelerate_resumed", "lightning"):
        dist.init_process_group("gloo")
    trainings = (fully_sharded, tied, accelerate, accelerate_resumed, lightning)
    found = {training.__name__: training for training in trainings}[name](rank, world)
    torch.save(found, folder / f"{name}-{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
