"""Encoder-decoder language models of transformers."""

from zerotrain.config.families import ROOT, FamilySpec

SPEC = FamilySpec(
    name="seq2seq_lm",
    modality="text",
    example="google/flan-t5-xl",
    trained_part=ROOT,
    parts=(ROOT,),
    encoder_decoder=True,
    classes={ROOT: "AutoModelForSeq2SeqLM"},
)
