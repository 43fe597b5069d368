"""Networks of Hugging Face's transformers and peft, tiny and random: they train as they come, and are covered."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ekfac import EKFAC

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install transformers peft"
)

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
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
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


#: The network, its loss, and the least share of its parameters that is in Kronecker or exact blocks.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor], float]] = {
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


def batches(steps: int) -> Iterator[Tensor]:
    """Batches of eight, and now and then a short one."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(3, VOCABULARY, (32, LENGTH), generator=generator)
    for i in range(steps):
        yield texts[torch.randint(0, 32, (8 if i % 7 else 5,), generator=generator)]


@pytest.mark.parametrize("name", NETWORKS)
def test_it_trains_as_it_comes(name: str) -> None:
    build, loss, least = NETWORKS[name]
    torch.manual_seed(0)
    model = build()
    opt = EKFAC(model, lr=3e-3)
    rows = opt.summary().rows
    covered = sum(row.numbers for row in rows if row.block != "diagonal") / sum(row.numbers for row in rows)
    assert covered >= least, opt.summary()
    losses = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no Kronecker.*")
        for tokens in batches(30):
            opt.zero_grad()
            value = loss(model, tokens)
            value.backward()
            opt.step()
            losses.append(value.item())
    assert sum(losses[-5:]) < (0.999 if "LoRA" in name else 0.95) * sum(losses[:5])


def test_a_layer_of_no_examples_is_refused_where_each_ones_gradient_is_needed() -> None:
    model = gpt2()
    with EKFAC(model, lr=1e-3, scaling="per_example"), pytest.raises(ValueError, match=r"wpe.*\(1, 12\)"):
        language(model, next(batches(1)))
