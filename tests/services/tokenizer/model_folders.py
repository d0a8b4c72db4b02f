"""Makes the tokenizer files of small models, one for each common kind of tokenizer."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceTrainer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "Hello, world! The quick brown fox jumps over the lazy dog.",
    "hello there, how are you today? I am fine, thank you very much.",
    "Wer reitet so spät durch Nacht und Wind? Es ist der Vater mit seinem Kind.",
    "你好，世界。今天天气很好。",
    "def add(a, b):\n    return a + b\n",
    "user assistant system tool content role message 0123456789",
] * 8

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA = """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant') }}
    {% endif %}
    {% if message.role == 'user' %}
        {{ '[INST] ' + message['content'] | trim + ' [/INST]' }}
    {% else %}
        {% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}"""

PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def write(folder: Path, tokenizer: Tokenizer, template: str | None, **config: Any) -> Path:
    """Writes tokenizer.json, tokenizer_config.json and, if there is a template, chat_template.jinja. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def byte_level(folder: Path, template: str | None = CHATML) -> Path:
    """Makes a model like Qwen: byte-level BPE, ChatML, no BOS, and added tokens that are not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet))
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False), AddedToken("→ ", special=False)])
    return write(folder, tokenizer, template, eos_token="<|im_end|>", pad_token="<|endoftext|>", tool_token="<tool>")


def byte_fallback(folder: Path, template: str | None = LLAMA) -> Path:
    """Makes a model like Llama 2: sentencepiece BPE with Metaspace and byte fallback, and <s> before every prompt."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ascii_corpus = [line for line in CORPUS if line.isascii()]
    tokenizer.train_from_iterator(ascii_corpus, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bos = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[bos])
    return write(folder, _with_byte_tokens(tokenizer), template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _with_byte_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Returns the tokenizer with the byte-fallback tokens <0x00> to <0xFF> added to its model."""
    spec = json.loads(tokenizer.to_str())
    vocab = spec["model"]["vocab"]
    vocab.pop("\n", None)
    spec["model"]["merges"] = [pair for pair in spec["model"]["merges"] if "\n" not in "".join(pair)]
    for token in [token for token in vocab if "\n" in token]:
        del vocab[token]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = 1000 + byte
    spec["model"]["byte_fallback"] = True
    return Tokenizer.from_str(json.dumps(spec))


def wordpiece(folder: Path, template: str | None = PLAIN) -> Path:
    """Makes a model like BERT: WordPiece, lower case, [CLS] and [SEP] around every text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special))
    tokenizer.decoder = decoders.WordPiece()
    marks = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=marks
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return write(folder, tokenizer, template, **names)


def unigram(folder: Path, template: str | None = PLAIN) -> Path:
    """Makes a model like T5: Unigram with Metaspace, and special tokens that only tokenizer_config.json declares."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.decoder = decoders.Metaspace()
    return write(
        folder, tokenizer, template, eos_token="</s>", unk_token="<unk>", extra_special_tokens=["<extra_0>", "<extra_1>"]
    )


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "wordpiece": wordpiece, "unigram": unigram}


def sentencepiece_model(path: Path) -> Path:
    """Writes a file in the format of Llama 2's tokenizer.model: BPE of 400 pieces with byte fallback. Returns the folder."""
    prefix = str(path.with_suffix(""))
    SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in CORPUS if line.isascii()]),
        model_prefix=prefix,
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    Path(f"{prefix}.model").rename(path)
    Path(f"{prefix}.vocab").unlink()
    return path.parent


def tiktoken_ranks(path: Path) -> Path:
    """Writes a file like Llama 3's tokenizer.model: one token in base64 and its rank per line. Returns the folder."""
    tokens = [bytes([value]) for value in range(256)] + [b"he", b"ll", b"llo", b"hello", b" w", b"or"]
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path.parent
