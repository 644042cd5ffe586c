"""Components of layer names in the small models; reading them from a model would need torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PRESET_LAYERS: Mapping[str, Sequence[str]] = {
    "sdxl": (
        "act", "add_embedding", "add_time_proj", "attentions", "attn1", "attn2", "conv",
        "conv1", "conv2", "conv_act", "conv_in", "conv_norm_out", "conv_out",
        "conv_shortcut", "down_blocks", "downsamplers", "dropout", "ff", "linear_1",
        "linear_2", "mid_block", "net", "nonlinearity", "norm", "norm1", "norm2", "norm3",
        "proj", "proj_in", "proj_out", "resnets", "time_emb_proj", "time_embedding",
        "time_proj", "to_k", "to_out", "to_q", "to_v", "transformer_blocks", "up_blocks",
        "upsamplers",
    ),
    "sd3": (
        "act", "act_1", "add_k_proj", "add_q_proj", "add_v_proj", "attn",
        "context_embedder", "ff", "ff_context", "linear", "linear_1", "linear_2", "net",
        "norm", "norm1", "norm1_context", "norm2", "norm2_context", "norm_out",
        "pos_embed", "proj", "proj_out", "silu", "text_embedder", "time_proj",
        "time_text_embed", "timestep_embedder", "to_add_out", "to_k", "to_out", "to_q",
        "to_v", "transformer_blocks",
    ),
    "qwen_image": (
        "act", "add_k_proj", "add_q_proj", "add_v_proj", "attn", "img_in", "img_mlp",
        "img_mod", "img_norm1", "img_norm2", "linear", "linear_1", "linear_2", "net",
        "norm", "norm_added_k", "norm_added_q", "norm_k", "norm_out", "norm_q",
        "pos_embed", "proj", "proj_out", "silu", "time_proj", "time_text_embed",
        "timestep_embedder", "to_add_out", "to_k", "to_out", "to_q", "to_v",
        "transformer_blocks", "txt_in", "txt_mlp", "txt_mod", "txt_norm", "txt_norm1",
        "txt_norm2",
    ),
    "flux": (
        "act", "act_1", "act_mlp", "add_k_proj", "add_q_proj", "add_v_proj", "attn",
        "context_embedder", "ff", "ff_context", "linear", "linear_1", "linear_2", "net",
        "norm", "norm1", "norm1_context", "norm2", "norm2_context", "norm_added_k",
        "norm_added_q", "norm_k", "norm_out", "norm_q", "pos_embed", "proj", "proj_mlp",
        "proj_out", "silu", "single_transformer_blocks", "text_embedder", "time_proj",
        "time_text_embed", "timestep_embedder", "to_add_out", "to_k", "to_out", "to_q",
        "to_v", "transformer_blocks", "x_embedder",
    ),
    "causal_lm": (
        "act_fn", "down_proj", "embed_tokens", "gate_proj", "input_layernorm", "k_proj",
        "layers", "lm_head", "mlp", "model", "norm", "o_proj", "post_attention_layernorm",
        "q_proj", "rotary_emb", "self_attn", "up_proj", "v_proj",
    ),
    "seq2seq_lm": (
        "DenseReluDense", "EncDecAttention", "SelfAttention", "act", "block", "decoder",
        "dropout", "embed_tokens", "encoder", "final_layer_norm", "k", "layer",
        "layer_norm", "lm_head", "o", "q", "relative_attention_bias", "shared", "v", "wi",
        "wo",
    ),
}  # fmt: skip
"""By family, without numbers; `nano` and `micro` have the same."""
