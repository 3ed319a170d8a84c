"""A byte-level BPE (Sennrich et al. 2016, on bytes as in GPT-2); every digit is a token, so that the model can learn sums."""

import re
from itertools import islice

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from baton.models.train.corpus import BOS, SPECIAL, documents

DOCUMENT_WORDS = 250


def train_tokenizer(vocab: int, seed: int, count: int) -> Tokenizer:
    """Exactly `vocab` entries, special tokens first, from `count` documents. Raises ValueError if these do not yield that many."""
    texts = (re.sub(r"<\|\w+\|>", "\n", text) for text in islice(documents(seed, "tokenizer", DOCUMENT_WORDS), count))
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = ByteLevelDecoder()
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    trainer = BpeTrainer(vocab_size=vocab, special_tokens=special, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"vocab {vocab} cannot be reached: the documents yield {tokenizer.get_vocab_size()}")
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, SPECIAL.index(BOS))])
    return tokenizer
