"""Writes tiny models without weights, and LoRA adapters with random weights, for engine.py: models.py DIR."""

import json
import pathlib
import sys

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 512
HIDDEN = 64
LAYERS = 2
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
RANK = 8

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 257,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}

LLAMA = COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": LAYERS}

# Sliding windows of two blocks of 32 tokens beside full attention.
GEMMA = COMMON | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 64,
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
}

# Linear attention (Gated DeltaNet) in three layers of four. Its states are small enough for blocks of 32 tokens: vLLM makes blocks larger otherwise.
# Of other models with states, vLLM 0.32.0 for CPUs cannot run Falcon-H1 with these sizes (its first step ends with an IndexError), and has no Bamba.
# Heads of linear attention that are smaller than 128 fail too ("Unexpected head dim size").
QWEN = COMMON | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_key_value_heads": 4,
    "head_dim": 128,
    "linear_num_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000,
    "attn_output_gate": True,
}

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def write_model(into, config):
    into.mkdir(parents=True)
    (into / "config.json").write_text(json.dumps(config))
    (into / "generation_config.json").write_text(json.dumps({"bos_token_id": 256, "eos_token_id": 257}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(into / "tokenizer.json"))
    (into / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "chat_template": TEMPLATE,
                "model_max_length": 8192,
            }
        )
    )


def write_adapter(into, seed):
    """Writes a LoRA adapter of the queries of LLAMA."""
    into.mkdir(parents=True)
    torch.manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[name + ".lora_A.weight"] = torch.randn(RANK, HIDDEN, dtype=torch.bfloat16)
        weights[name + ".lora_B.weight"] = torch.randn(HEADS * HEAD_DIM, RANK, dtype=torch.bfloat16)
    save_file(weights, str(into / "adapter_model.safetensors"))
    (into / "adapter_config.json").write_text(
        json.dumps(
            {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["q_proj"], "bias": "none"}
        )
    )


if __name__ == "__main__":
    out = pathlib.Path(sys.argv[1])
    write_model(out / "llama", LLAMA)
    write_model(out / "gemma3", GEMMA)
    write_model(out / "qwen3-next", QWEN)
    write_adapter(out / "adapter-a", 1)
    write_adapter(out / "adapter-b", 2)
