"""Models that paged attention would serve wrongly are refused by name, with what kind of model they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.masking_utils import AttentionMaskInterface

from engine.errors import ModelLoadError
from engine.model import kinds, loading, selfcheck
from engine.model.sources import PreparedModel
from tests.engine.model import tiny

CODEC = {
    "vocab_size": 97,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 1,
    "num_heads": 4,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
}
SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 2}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **EXPERTS,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
GPT = {"vocab_size": 97, "n_positions": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "pad_token_id": 0}

ENCODER_DECODER = {
    "t5": transformers.T5Config(**CODEC),
    "bart": transformers.BartConfig(**CODEC),
}
LINEAR = {
    "mamba": transformers.MambaConfig(**SMALL, state_size=8),
    "mamba2": transformers.Mamba2Config(**SMALL, num_heads=4, head_dim=16, expand=2, state_size=8, n_groups=1),
    "rwkv": transformers.RwkvConfig(**SMALL, attention_hidden_size=32, context_length=64),
}
HYBRID = {
    "qwen3_next": transformers.Qwen3NextConfig(
        **{**tiny.COMMON, **EXPERTS, "num_hidden_layers": 4},
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "jamba": transformers.JambaConfig(
        **{**tiny.COMMON, **EXPERTS}, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4
    ),
    "bamba": transformers.BambaConfig(**tiny.COMMON, **MAMBA, attn_layer_indices=[1]),
    "falcon_h1": transformers.FalconH1Config(**tiny.COMMON, **MAMBA, mamba_d_ssm=64),
    "lfm2": transformers.Lfm2Config(**tiny.COMMON, full_attn_idxs=[1]),
    "recurrent_gemma": transformers.RecurrentGemmaConfig(**tiny.COMMON, lru_width=32, attention_window_size=7),
    "minimax": transformers.MiniMaxConfig(**tiny.COMMON, **EXPERTS),
}
MULTI_LATENT = {
    "deepseek_v2": transformers.DeepseekV2Config(**{**tiny.COMMON, **LATENT}),
    "deepseek_v3": transformers.DeepseekV3Config(**{**tiny.COMMON, **LATENT}),
}
IRREPLACEABLE = {
    "bloom": transformers.BloomConfig(**SMALL, n_head=4, n_layer=2, seq_length=64, max_position_embeddings=64),
    "mpt": transformers.MptConfig(vocab_size=97, d_model=32, n_heads=4, n_layers=2, max_seq_len=64),
    "falcon": transformers.FalconConfig(**SMALL, num_attention_heads=4, max_position_embeddings=64),
    "doge": transformers.DogeConfig(**tiny.COMMON),
}
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "encoder-decoder model": (ENCODER_DECODER, "it is an encoder-decoder model"),
    "linear-attention model": (LINEAR, "it is a linear-attention model"),
    "hybrid model": (HYBRID, "it is a hybrid model"),
    "multi-latent attention": (MULTI_LATENT, "its multi-latent attention"),
    "attention of its own": (IRREPLACEABLE, "cannot be replaced by Keepwarm's"),
}
CASES = [(name, config, words) for configs, words in KINDS.values() for name, config in configs.items()]


def save(name: str, config: Any, folder: Path) -> PreparedModel:
    """The model's files; an encoder-decoder is not made by the class that makes the others."""
    if name not in ENCODER_DECODER:
        return tiny.save(config, folder / name)
    transformers.AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder / name)
    return PreparedModel(name=name, path=folder / name, digest="0")


def why(prepared: PreparedModel) -> str:
    """The sentence by which loading it ends, without what all of them have."""
    with pytest.raises(ModelLoadError) as error:
        selfcheck.probe(loading.load(prepared, "cpu", "float32"))
    message, start, end = str(error.value), f"{prepared.name} cannot be served: ", f"; {kinds.ADVICE}"
    assert message.startswith(start)
    assert message.endswith(end)
    assert "\n" not in message
    return message.removeprefix(start).removesuffix(end)


@pytest.mark.parametrize(("name", "config", "words"), CASES, ids=[name for name, _, _ in CASES])
def test_a_kind_of_model_is_refused_by_name(name: str, config: Any, words: str, tmp_path: Path) -> None:
    reason = why(save(name, config, tmp_path))
    assert words in reason
    assert f"({name})" in reason


def test_layers_without_attention_are_refused_where_the_configuration_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "RUNNING_STATE", set())
    reason = why(save("lfm2", HYBRID["lfm2"], tmp_path))
    assert reason == "its attention (lfm2) is not called once for each layer, in order, but for layers [1]"


def test_a_model_that_counts_positions_itself_is_refused(tmp_path: Path) -> None:
    config = transformers.BartConfig(**CODEC, is_encoder_decoder=False, is_decoder=True)
    config.architectures = ["BartForCausalLM"]
    reason = why(tiny.save(config, tmp_path / "bart"))
    assert reason == "its positions (bart) depend on what else is read in the same step"


def test_layers_of_unlike_shapes_are_refused(tmp_path: Path) -> None:
    layers = ["sliding_attention", "full_attention", "full_attention"]
    extra = {"global_head_dim": 16, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    config = transformers.Gemma4TextConfig(**tiny.COMMON, **extra, sliding_window=7, layer_types=layers)
    assert "(gemma4_text) keeps K and V of unlike shapes" in why(tiny.save(config, tmp_path / "gemma4"))


def test_two_calls_of_attention_in_a_layer_are_refused(tmp_path: Path) -> None:
    config = transformers.DiffLlamaConfig(**tiny.COMMON)
    assert "for layers [0, 0, 1, 1, 2, 2]" in why(tiny.save(config, tmp_path / "diffllama"))


def llama4(**extra: Any) -> Any:
    return transformers.Llama4TextConfig(**tiny.COMMON, intermediate_size_mlp=48, num_local_experts=2, **extra)


# What 48 tokens cannot show: each of these would pass the numeric check and be wrong further on.
BEYOND: dict[str, tuple[Any, str]] = {
    "chunked": (
        llama4(attn_temperature_tuning=False, attention_chunk_size=100),
        "layer 0 (chunked attention) looks elsewhere than Keepwarm's: token 100 does not see token 0",
    ),
    "scaled by count": (
        llama4(floor_scale=100, attention_chunk_size=tiny.CONTEXT),
        "its attention (llama4_text) is scaled by how many tokens are read at once",
    ),
    "window in the mask of one layer": (
        transformers.Qwen2MoeConfig(
            **{**tiny.COMMON, **EXPERTS},
            shared_expert_intermediate_size=16,
            use_sliding_window=True,
            sliding_window=100,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        ),
        "layer 1 (sliding attention) looks elsewhere than Keepwarm's: token 100 does not see token 0",
    ),
    "window in the mask alone": (
        tiny.config_of("phimoe", sliding_window=100),
        "layer 0 (attention) looks elsewhere than Keepwarm's: token 100 does not see token 0",
    ),
}


@pytest.mark.parametrize("name", BEYOND)
def test_what_differs_only_beyond_the_checked_tokens_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, words = BEYOND[name]
    prepared = tiny.save(config, tmp_path / "model")
    assert why(prepared) == words
    monkeypatch.setattr(kinds, "require_servable", lambda *_: None)
    loaded = loading.load(prepared, "cpu", "float32")
    monkeypatch.setattr(selfcheck, "_require_equal_rules", lambda *_: None)
    selfcheck.check(loaded, tiny.make_pool(loaded))  # alone, it would let the model pass


def test_chunks_and_windows_that_no_context_reaches_are_served(tmp_path: Path) -> None:
    config = llama4(attn_temperature_tuning=False, attention_chunk_size=100)
    loaded = loading.load(tiny.save(config, tmp_path / "llama4"), "cpu", "float32", context=100)
    selfcheck.check(loaded, tiny.make_pool(loaded))


@pytest.mark.parametrize(
    "config",
    [
        transformers.BertConfig(**SMALL, num_attention_heads=4, intermediate_size=48),
        tiny.config_of("llama", is_causal=False),
        tiny.config_of("mistral", is_causal=False),
    ],
    ids=["bert", "llama", "mistral"],
)
def test_a_model_that_looks_ahead_is_refused(config: Any, tmp_path: Path) -> None:
    assert why(tiny.save(config, tmp_path / "model")) == "layer 0 (attention) looks ahead: token 0 sees token 1"


def test_a_mask_that_the_model_makes_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = tiny.save(tiny.config_of("llama"), tmp_path / "llama")
    masks = AttentionMaskInterface._global_mapping
    monkeypatch.setitem(masks, "keepwarm_witness", lambda *_, **__: torch.zeros(1, 1, 4, 4))
    assert why(prepared) == "layer 0 (attention) makes a mask of its own, which cannot be checked"


def test_an_argument_of_attention_that_is_not_known_is_refused(tmp_path: Path) -> None:
    loaded = tiny.load("llama", tmp_path, fuse=False)
    for layer in loaded.module.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "position_bias": torch.zeros(1)}), with_kwargs=True
        )
    with pytest.raises(ModelLoadError, match=r"its attention \(llama\) needs 'position_bias'"):
        selfcheck.probe(loaded)


def test_a_model_that_needs_pictures_is_refused(tmp_path: Path) -> None:
    eyes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**eyes, image_size=16, patch_size=8),
        text_config=tiny.config_of("llama"),
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "llava")
    prepared = PreparedModel(name="llava", path=tmp_path / "llava", digest="0")
    assert why(prepared) == "transformers does not know its kind (llava) as a model that writes text"


def test_a_model_that_does_not_say_its_context_is_refused(tmp_path: Path) -> None:
    config = tiny.config_of("llama", max_position_embeddings=0)
    with pytest.raises(ModelLoadError, match=r"^llama does not say its context length"):
        loading.load(tiny.save(config, tmp_path / "llama"), "cpu", "float32")
