"""Causal language models of transformers."""

from zerotrain.config.families import ROOT, FamilySpec

SPEC = FamilySpec(
    name="causal_lm",
    modality="text",
    example="Qwen/Qwen2.5-7B",
    trained_part=ROOT,
    parts=(ROOT,),
    classes={ROOT: "AutoModelForCausalLM"},
)
