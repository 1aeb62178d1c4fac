"""A tiny Llama or Qwen3 with random weights, a tiny tokenizer and a ChatML template, as a Hugging Face folder."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")


def byte_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Every byte a token (ids 0–255), then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def save_tiny_target(folder: Path, family: str = "llama") -> Path:
    """Two layers, hidden 64; weights wide enough that greedy answers differ from prompt to prompt."""
    torch.manual_seed(0)
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    tokenizer = byte_tokenizer()
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = model_class(config)
    # A wider row is the largest logit more often: some answers end by themselves.
    model.lm_head.weight.data[tokenizer.eos_token_id] *= 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}" + CHATML
)

TAGGED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# What matters of a reasoning model's template: thoughts are written for the last reply only, earlier ones lose theirs,
# and with `enable_thinking` off the generation prompt supplies an empty thought.
THINKING = (
    "{% set last = namespace(user=-1) %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{% set last.user = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% if '</think>' in message['content'] %}"
    "{% set thought = message['content'].split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set answer = message['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% else %}{% set thought = '' %}{% set answer = message['content'] %}{% endif %}"
    "{% if loop.index0 > last.user %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ answer }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
