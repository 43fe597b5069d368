"""Networks of other libraries, tiny and random, with a loss for each, and how much of them is covered at the least."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ekfac


class Package:
    """A package that is imported when something of it is used, and may not be there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self.name), attribute)


transformers, peft, timm = Package("transformers"), Package("peft"), Package("timm")
pyg, pyg_data = Package("torch_geometric.nn"), Package("torch_geometric.data")

VOCABULARY, LENGTH = 64, 12
WIDTHS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip
CAUSAL = WIDTHS | {"num_hidden_layers": 1, "num_key_value_heads": 2}
WHISPER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "num_mel_bins": 8, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "d_model": 32, "max_source_positions": LENGTH, "max_target_positions": 16, "decoder_start_token_id": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def clip() -> nn.Module:
    side = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = side | {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 0}
    vision = side | {"image_size": 8, "patch_size": 4}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def causal(name: str, **options: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**CAUSAL, **options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def lora(base: Callable[[], nn.Module], **options: Any) -> nn.Module:
    return peft.get_peft_model(base(), peft.LoraConfig(r=4, lora_alpha=8, **options))


def language(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def classes(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens[:, 0] % 2).loss


def sound(model: nn.Module, tokens: Tensor) -> Tensor:
    features = (tokens[:, None] / VOCABULARY - 0.5).expand(-1, 8, -1).repeat(1, 1, 2).contiguous()
    return model(input_features=features, labels=tokens[:, :6]).loss


def pairs(model: nn.Module, tokens: Tensor) -> Tensor:
    pixels = (tokens / VOCABULARY - 0.5).repeat(1, 16)[:, : 3 * 64].reshape(-1, 3, 8, 8)
    return model(input_ids=tokens, pixel_values=pixels, return_loss=True).loss


def features(model: nn.Module, tokens: Tensor) -> Tensor:
    """CLIP by its two halves, the model itself never called."""
    pixels = (tokens / VOCABULARY - 0.5).repeat(1, 16)[:, : 3 * 64].reshape(-1, 3, 8, 8)
    text, image = model.get_text_features(tokens), model.get_image_features(pixels)
    text, image = (getattr(x, "pooler_output", x) for x in (text, image))
    text, image = (nn.functional.normalize(x, dim=-1) for x in (text, image))
    return nn.functional.cross_entropy(10 * text @ image.T, torch.arange(len(tokens)))


def graphs(model: nn.Module, tokens: Tensor) -> Tensor:
    """Every example is a graph: a ring of its tokens."""
    n = torch.arange(LENGTH)
    edges = torch.stack([torch.cat([n, n.roll(1)]), torch.cat([n.roll(1), n])])
    made = [pyg_data.Data(x=nn.functional.one_hot(t, VOCABULARY).float(), edge_index=edges) for t in tokens]
    return nn.functional.cross_entropy(model(pyg_data.Batch.from_data_list(made)), tokens[:, 0] % 2)


class Graphs(nn.Module):
    def __init__(self, convolution: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.head = convolution(VOCABULARY, 32), convolution(32, 32), nn.Linear(32, 2)

    def forward(self, data: Any) -> Tensor:
        x = self.second(self.first(data.x, data.edge_index).relu(), data.edge_index).relu()
        out: Tensor = self.head(pyg.global_mean_pool(x, data.batch))
        return out


def images(model: nn.Module, tokens: Tensor) -> Tensor:
    pixels = (tokens / VOCABULARY - 0.5).repeat(1, 3 * 32 * 32 // LENGTH).reshape(-1, 3, 32, 32)
    return nn.functional.cross_entropy(model(pixels), tokens[:, 0] % 2)


def of_timm(name: str, **options: Any) -> nn.Module:
    return timm.create_model(name, pretrained=False, num_classes=2, **options)


VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


@dataclass(frozen=True)
class Network:
    """A network: its package, how it is built, its loss of a batch of tokens, the least share in blocks, options."""

    package: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor], Tensor]
    least: float
    options: Callable[[], dict[str, Any]] = dict


HUGGING_FACE: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor], float]] = {
    "GPT-2": (gpt2, language, 0.99),
    "BERT": (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**WIDTHS)), language, 0.99),
    "BERT, classes": (
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**WIDTHS)), classes, 0.99),
    "DistilBERT": (
        lambda: transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(
            vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=16)),
        language, 0.99),
    "DeBERTa": (
        lambda: transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(
            **WIDTHS, relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"])), language, 0.95),
    "T5": (
        lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0,
            pad_token_id=0)), language, 0.99),
    "Whisper": (
        lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER)), sound, 0.95),
    "CLIP": (clip, pairs, 0.99),
    "CLIP, features": (clip, features, 0.99),
    "Llama": (lambda: causal("Llama"), language, 0.99),
    "Qwen2": (lambda: causal("Qwen2"), language, 0.99),
    "Gemma2": (lambda: causal("Gemma2", head_dim=16), language, 0.99),
    "Mixtral": (lambda: causal("Mixtral", num_local_experts=4, num_experts_per_tok=2), language, 0.95),
    "LoRA on Llama": (lambda: lora(lambda: causal("Llama"), target_modules="all-linear"), language, 0.99),
    "LoRA on GPT-2": (
        lambda: lora(gpt2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True), language, 0.99),
}  # fmt: skip
NETWORKS: dict[str, Network] = {
    **{name: Network("peft" if "LoRA" in name else "transformers", *entry) for name, entry in HUGGING_FACE.items()},
    "ViT": Network("timm", lambda: of_timm("vit_tiny_patch16_224", **VIT), images, 0.95),
    "BEiT": Network("timm", lambda: of_timm("beit_base_patch16_224", **VIT), images, 0.75),
    "EVA-02": Network("timm", lambda: of_timm("eva02_tiny_patch14_224", **VIT), images, 0.75),
    "ResNet": Network("timm", lambda: of_timm("resnet10t", stem_width=8, channels=(8, 16, 16, 32)), images, 0.99),
    "ConvNeXt": Network(
        "timm", lambda: of_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)), images, 0.9),
    "GCN": Network("torch_geometric", lambda: Graphs(pyg.GCNConv), graphs, 0.9),
    "GraphSAGE": Network("torch_geometric", lambda: Graphs(pyg.SAGEConv), graphs, 0.99),
    "GAT": Network(
        "torch_geometric", lambda: Graphs(pyg.GATConv), graphs, 0.9,
        lambda: {"batch": ekfac.Batch(count=lambda data: data.num_graphs)}),
}  # fmt: skip
