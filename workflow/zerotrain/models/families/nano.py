"""The builder of small models, which need no hub: the presets `nano` and `micro`.

A tokenizer is trained on the captions or conversations, an autoencoder is fitted to the images,
text encoders keep their random initial weights, which still distinguish captions. Equal arguments
give equal files.
"""

from __future__ import annotations

import inspect
import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import CLIPTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer, T5Tokenizer
from transformers.utils import logging

from zerotrain.artifact.documents import parse_json
from zerotrain.models.families.autoencoders import (
    build_autoencoder,
    fit_autoencoder,
    identity_autoencoder,
    statistics,
)
from zerotrain.models.families.pipelines import pipeline_class
from zerotrain.models.families.qwen_image_encoding import PLAIN
from zerotrain.models.families.qwen_image_nano import VISION_TOKENS
from zerotrain.models.families.small_models import (
    MAX_ROW,
    MAX_TOKENS,
    ImageFamily,
    SmallSpec,
    TextFamily,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from zerotrain.data.conversation import Conversation
    from zerotrain.models.families.autoencoders import FittedAutoencoders

START, END = "<|startoftext|>", "<|endoftext|>"
VOCABULARY = 2048
"""The maximum; a few captions need far fewer tokens."""
RARE = -20.0
"""Logarithm of the probability of a single character."""
QWEN_END, QWEN_START, QWEN_PADDING = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
TEXT_PADDING, TEXT_START, TEXT_END = "<pad>", "<s>", "</s>"
TEXT_VOCABULARY = 1024
"""The maximum; small tasks need far fewer tokens."""
PIECES = Regex(r"\d| ?\p{L}+| ?[^\s\d\p{L}]+|\s+")
"""Each digit is a piece, as in Qwen2: a model that calculates needs to see each."""
FEWEST = 50
"""Minimum of occurrences for merging two pieces: rare words are spelled."""


def build_pipeline(
    family: ImageFamily,
    captions: Sequence[str],
    images: Sequence[Image],
    seed: int,
    out: Path,
    *,
    preset: str = "nano",
    pipeline: str | None = None,
    identity: bool = False,
    longest: int | None = None,
    store: FittedAutoencoders | None = None,
) -> None:
    """Write a family's small model into `out` in diffusers' layout.

    Args:
        family: The family.
        captions: Texts that the tokenizers are trained on.
        images: Squares of one size.
        seed: Decides every weight.
        out: Folder to write into.
        preset: `nano` or `micro`.
        pipeline: Class of the pipeline, if it is not the family's own.
        identity: Whether the autoencoder is the identity, so that pixels are the latents.
        longest: Longest side of the images that it is trained on; None for squares.
        store: Store that the fitted autoencoder is read from or added to.
    """
    small, kind = family.small, family.spec.classes["vae"]
    chosen, side = pipeline or family.spec.pipeline, images[0].width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        trained = {
            name: TOKENIZERS[name](captions, chosen)
            for name in dict.fromkeys(small.tokenizers.values())
        }
        tokenizers = {part: trained[name] for part, name in small.tokenizers.items()}
        if identity:
            vae = identity_autoencoder(kind)
        else:
            vae = build_autoencoder(kind, side)
            mean, std = fit_autoencoder(vae, images, seed, store=store)
            vae.register_to_config(**statistics(kind, mean if small.shifts else None, std))
        spec = SmallSpec(preset, chosen, tokenizers, side, latent_channels(vae), longest)
        extends = chosen in small.extended
        built = pipeline_class(family.spec.pipeline if extends else chosen)(
            vae=vae,
            **build_models(family, spec),
            **tokenizers,
            scheduler=getattr(diffusers, small.scheduler)(**small.schedule),
            **family.spec.loading,
        )
        built.save_pretrained(out)
        if extends and small.add_parts is not None:
            small.add_parts(spec, out)


def build_models(family: ImageFamily, spec: SmallSpec) -> dict[str, Any]:
    """Build the models of a family other than the autoencoder, by part."""
    parts = family.small.parts(spec)
    return {name: build_model(family.spec.classes[name], **given) for name, given in parts.items()}


def build_model(kind: str, **arguments: Any) -> Any:
    """Build a model of a class of diffusers, or of transformers by its configuration's values."""
    if hasattr(diffusers, kind):
        return getattr(diffusers, kind)(**arguments)
    found: Any = getattr(transformers, kind)
    return found(found.config_class(**arguments))


def latent_channels(autoencoder: Any) -> int:
    """Return the number of channels of an autoencoder's latents."""
    config = autoencoder.config
    found: int = getattr(config, "latent_channels", None) or config.z_dim
    return found


def build_language_model(
    family: TextFamily,
    conversations: Sequence[Conversation],
    seed: int,
    out: Path,
    *,
    preset: str = "nano",
) -> None:
    """Write a family's small model and its tokenizer into `out`."""
    logging.disable_progress_bar()
    tokenizer = train_byte_tokenizer(conversations, seq2seq=family.spec.encoder_decoder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(family.small.model, **family.small.arguments(tokenizer, preset))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def train_tokenizer(captions: Sequence[str], pipeline: str = "") -> Any:
    """Train a CLIP tokenizer (byte-level BPE with `</w>`) on the captions.

    Every byte has a token with and without `</w>`, so that any later prompt can be encoded: BPE
    training adds `</w>` only to the bytes that end a word of the captions.
    """
    template = CLIPTokenizer().backend_tokenizer
    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    trained.normalizer = template.normalizer
    trained.pre_tokenizer = template.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ends = [byte + "</w>" for byte in alphabet]
    trained.train_from_iterator(
        captions,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY + len(ends),
            # Pairs of equal counts are merged in the order of their tokens' numbers, which those
            # with `</w>` would get in the order of a hash with another seed in each call.
            special_tokens=[*alphabet, *ends],
            end_of_word_suffix="</w>",
            show_progress=False,
        ),
    )
    merges = [
        tuple(pair) for pair in parse_json(trained.to_str(), "the tokenizer")["model"]["merges"]
    ]
    tokens = [
        *alphabet,
        *ends,
        *("".join(pair) for pair in merges),
        START,
        END,
    ]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=MAX_TOKENS)


def train_t5_tokenizer(captions: Sequence[str], pipeline: str = "") -> Any:
    """Train a T5 tokenizer (Unigram) of the captions' words and of printable ASCII characters."""
    words = Counter(f"\u2581{word}" for caption in captions for word in caption.split())
    total = sum(words.values())
    known = [(word, math.log(count / total)) for word, count in words.most_common(VOCABULARY)]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    letters = [("\u2581", RARE), *((sign, RARE) for sign in string.printable.strip())]
    pieces = dict([*reversed(letters), *known])  # one-letter words have a word's probability
    return T5Tokenizer(
        vocab=special + sorted(pieces.items()), extra_ids=0, model_max_length=MAX_TOKENS
    )


def train_qwen_tokenizer(captions: Sequence[str], pipeline: str) -> Any:
    """Train a Qwen2 tokenizer (byte-level BPE) on the pipeline's template and the captions.

    The template's words become single tokens, as in Qwen's own tokenizer: the pipeline drops as
    many tokens as precede the prompt there.
    """
    kind = pipeline_class(pipeline)
    empty = kind(*[None] * len(inspect.signature(kind).parameters))
    template = empty.prompt_template_encode
    special = () if pipeline == PLAIN else VISION_TOKENS.values()
    own = Qwen2Tokenizer().backend_tokenizer
    trained = Tokenizer(models.BPE())
    trained.normalizer, trained.pre_tokenizer = own.normalizer, own.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (part for c in captions for part in re.split(r"<\|\w+\|>", template.format(c)))
    trained.train_from_iterator(texts, trainer)
    model = parse_json(trained.to_str(), "the tokenizer")["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        eos_token=QWEN_END,
        pad_token=QWEN_PADDING,
        unk_token=QWEN_PADDING,
        extra_special_tokens=[QWEN_START, *special],
    )
    before = tokenizer(re.split(r"\{\}|<\|vision_start", template)[0]).input_ids
    if len(before) != empty.prompt_template_encode_start_idx:
        raise AssertionError(f"{len(before)} tokens precede a prompt; the pipeline drops others")
    return tokenizer


TOKENIZERS = {"clip": train_tokenizer, "t5": train_t5_tokenizer, "qwen2": train_qwen_tokenizer}
"""Trainers of tokenizers for a pipeline's class on captions, by kind."""


def train_byte_tokenizer(conversations: Sequence[Conversation], *, seq2seq: bool) -> Any:
    """Train a byte-level BPE tokenizer on the conversations.

    Every byte has a token, so that any later text can be encoded. For a seq2seq model, each text
    ends with TEXT_END, as with T5 and BART.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained.decoder = decoders.ByteLevel()
    trained.train_from_iterator(
        (message.content for one in conversations for message in one.messages),
        trainers.BpeTrainer(
            vocab_size=TEXT_VOCABULARY,
            min_frequency=FEWEST,
            special_tokens=[TEXT_PADDING, TEXT_START, TEXT_END],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    if seq2seq:
        trained.post_processor = processors.TemplateProcessing(
            single=f"$A {TEXT_END}", special_tokens=[(TEXT_END, trained.token_to_id(TEXT_END))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=trained,
        pad_token=TEXT_PADDING,
        bos_token=TEXT_START,
        eos_token=TEXT_END,
        model_max_length=MAX_ROW,
        clean_up_tokenization_spaces=False,
    )
