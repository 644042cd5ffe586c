"""The nano SD3: the real classes, the same bytes from the same seed."""

from __future__ import annotations

from tests.builders.images import CAPTIONS

from zerotrain.models.families import nano as nano_parts
from zerotrain.models.families.sd3 import FAMILY
from zerotrain.models.families.small_models import MAX_TOKENS, TEXT_WIDTH


def test_captions_that_differ_in_a_word_are_distinguished(nano_sd3):
    """By each of the three encoders: one word moves its tokens visibly."""
    found = FAMILY.load_encoders(nano_sd3, "cpu").encode_prompts(["a red house", "a blue house"])
    tokens, width = MAX_TOKENS, TEXT_WIDTH["nano"]
    embeds = found["prompt_embeds"]
    parts = [embeds[:, :tokens, :width], embeds[:, :tokens, width:], embeds[:, tokens:]]
    for first, second in [*parts, found["pooled_prompt_embeds"]]:
        assert (first - second).norm() > 0.05 * first.norm()


def test_a_t5_tokenizer_knows_words_of_captions_and_letters_of_others():
    tokenizer = nano_parts.train_t5_tokenizer(CAPTIONS)
    assert tokenizer.tokenize("a red house") == ["▁a", "▁red", "▁house"]
    assert tokenizer.unk_token_id not in tokenizer("any other text: 42!").input_ids
    assert tokenizer("").input_ids == [tokenizer.eos_token_id]
