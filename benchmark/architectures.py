"""Try agents of many architectures, with tiny random models, and write down what each can do.

python -m benchmark.architectures                     all of them; prints a table
python -m benchmark.architectures llama mamba         these

Of each, whole and as adapters on it, trained by ippo_llm for an update: the largest difference of log-probabilities
and hidden states that the agent samples and learns from, from those of each transcript read alone, without padding or
cache; the same of gradients; whether the update changes the weights; whether what is saved opens with the same logits;
and, where a model takes no padding, how many times as long it samples as it would with its cache.
"""

import argparse
import contextlib
import io
import tempfile
import time
from types import SimpleNamespace

import peft
import torch
import transformers
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import ippo_llm
from utils import models
from utils.models import causal_lm
from utils.models.loading import locate

RANKS = {"whole": 0, "adapters": 4}
TOKENIZER = "utils/tiny_lm"
NEW_TOKENS = 6

# Sizes by the names that configurations have for them; each takes those that it has.
SIZES = {
    "vocab_size": 768,
    "hidden_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "sliding_window": 8,
    "word_embed_proj_dim": 32,
    "rotary_dim": 4,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    # linear attention and state spaces
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 1,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "state_size": 8,
    "n_groups": 1,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "lru_width": 32,
    "attention_window_size": 8,
    "attention_hidden_size": 32,
    # per-layer inputs
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 768,
}
LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}
SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
LATENT = {  # multi-head latent attention
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "first_k_dense_replace": 1,
}
# What an architecture takes besides.
ARCHITECTURES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "mistral": {},
    "ministral3": {},
    "mixtral": {},
    "gemma2": SLIDING_AND_FULL,
    "gemma3_text": SLIDING_AND_FULL,
    "gemma4_text": SLIDING_AND_FULL | {"global_head_dim": 8, "num_kv_shared_layers": 0},
    "phi3": {},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": SLIDING_AND_FULL,
    "gptj": {},
    "bloom": {},
    "opt": {},
    "olmo2": {},
    "olmo3": SLIDING_AND_FULL,
    "smollm3": {},
    "granite": {},
    "granitemoe": {},
    "glm4": {},
    "glm4_moe": {"first_k_dense_replace": 1},
    "ernie4_5": {},
    "exaone4": SLIDING_AND_FULL,
    "cohere2": SLIDING_AND_FULL,
    "starcoder2": {},
    "stablelm": {},
    "seed_oss": {},
    "hunyuan_v1_dense": {},
    "nemotron": {},
    "deepseek_v3": LATENT,
    "minimax_m2": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "qwen3_next": LINEAR_AND_FULL,
    "qwen3_5_text": LINEAR_AND_FULL,
    "qwen3_5_moe_text": LINEAR_AND_FULL,
    "olmo_hybrid": LINEAR_AND_FULL,
    "kimi_linear": LATENT | LINEAR_AND_FULL | {"mlp_layer_types": ["dense", "sparse"], "linear_head_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "moe"]},
    "falcon_h1": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "mamba": {},
    "mamba2": {"head_dim": 16, "num_heads": 4, "expand": 2},
    "falcon_mamba": {},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "minimax": LINEAR_AND_FULL | {"block_size": 8},
    "rwkv": {"attention_hidden_size": 32},
}


def make_model(name):
    """A random model of an architecture, in float32; a third of its tokens end a response."""
    config_class = type(AutoConfig.for_model(name))
    fields = config_class().to_dict().keys() | config_class.attribute_map.keys()
    sizes = {size: value for size, value in SIZES.items() if size in fields}
    config = AutoConfig.for_model(name, **sizes | ARCHITECTURES[name] | {"pad_token_id": 0, "eos_token_id": 1})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model.generation_config.eos_token_id = list(range(1, config.vocab_size, 3))
    return model


class Task:
    """Prompts of one to eight words; an answer earns its share of different characters."""

    def train_dataset(self, size, seed):
        return [{"prompt": "word " * (1 + k % 8)} for k in range(size)]

    def formatters(self, item):
        return item["prompt"]

    def reward_func(self, answers):
        return [len(set(text)) / max(1, len(text)) for text in answers]


def train(folder, output_dir, lora_rank=0, **flags):
    """An agent, trained by ippo_llm for an update on eight prompts, with a critic of its own."""
    args = ippo_llm.Args(
        model=(folder,),
        num_agents=1,
        use_separate_critic=True,
        lora_rank=lora_rank,
        train_size=8,
        num_train_epochs=1,
        rollout_buffer_size=8,
        mini_batch_size=4,
        max_new_tokens=NEW_TOKENS,
        eval_interval=0,
        output_dir=output_dir,
        **flags,
    )
    (agent,), _ = ippo_llm.main(args, task=Task())
    return agent


# --- What a policy computes, against each row alone -------------------------------------------------------------------

LENGTHS = (3, 9, 14)
SAMPLED = ([1, 2], [4, 5, 6, 7, 8], [5, 6, 10, 11, 12, 13])  # places, in each row


def make_rows():
    """Random ids, and where they are sampled, both [3, 16]."""
    ids = torch.randint(3, 700, (len(LENGTHS), 16), generator=torch.Generator().manual_seed(1))
    where = torch.zeros_like(ids, dtype=torch.bool)
    for row, places in enumerate(SAMPLED):
        where[row, places] = True
    return ids, where


def read_alone(policy, ids, where):
    """What Policy.read gives, from a plain forward pass of each row, without its padding."""
    logits = []
    hidden_states = []
    with policy.active():
        for row, length in enumerate(LENGTHS):
            out = policy.base(input_ids=ids[row : row + 1, :length], use_cache=False, output_hidden_states=True)
            before = where[row].nonzero().squeeze(1) - 1
            hidden_states.append(out.hidden_states[-1][0, before])
            logits.append(out.logits[0, before] if "logits" in out else None)
    return causal_lm.Output(None if logits[0] is None else torch.cat(logits), torch.cat(hidden_states))


def reading_error(policy):
    """The largest difference of Policy.read from read_alone: of log-probabilities and hidden states, of gradients.

    The first two without gradients, where adapters may be merged, and with them; a gradient's relative to its largest.
    """
    ids, where = make_rows()
    errors = []
    gradients = []
    for has_gradient in (False, True):
        outputs = []
        with torch.set_grad_enabled(has_gradient):
            for out in (policy.read(ids, where), read_alone(policy, ids, where)):
                tensors = [out.hidden_states] + ([] if out.logits is None else [out.logits.log_softmax(-1)])
                outputs.append(tensors)
                if has_gradient:
                    generator = torch.Generator().manual_seed(2)
                    loss = sum((x * torch.randn(x.shape, generator=generator)).sum() for x in tensors)
                    own = torch.autograd.grad(loss, policy.parameters(), materialize_grads=True, allow_unused=True)
                    gradients.append(own)
        errors += [float((x - y).abs().max()) for x, y in zip(*outputs)]
    relative = [float((x - y).abs().max() / y.abs().max().clamp(min=1)) for x, y in zip(*gradients)]
    return max(errors), max(relative)


@torch.no_grad()
def sampling_error(policy):
    """The largest difference of log-probabilities, over steps of which one drops a row, from each row read alone."""
    ids, _ = make_rows()
    agent = SimpleNamespace(actor=policy)
    ids, mask = models.pad_left([row[:length].tolist() for row, length in zip(ids, LENGTHS)], agent)
    cache = None
    errors = []
    for step in range(4):
        out = policy.next_token(ids, mask, cache)
        with policy.active():
            for row, logits in enumerate(out.logits):
                alone = policy.base(input_ids=ids[row : row + 1, mask[row] > 0], use_cache=False).logits[0, -1]
                errors.append(float((logits.log_softmax(-1) - alone.log_softmax(-1)).abs().max()))
        goes_on = torch.arange(len(ids)) != (1 if step == 1 else -1)
        cache = out.cache.select(goes_on)
        ids = torch.cat([ids, out.logits.argmax(-1, keepdim=True)], 1)[goes_on]
        mask = torch.nn.functional.pad(mask[goes_on], (0, 1), value=1)
    return max(errors)


def weight_change(agent, initial):
    """The largest change of a weight in the update; adapters begin with B = 0."""
    if agent.actor.adapter is not None:
        names = [name for name, _ in agent.actor.model.named_parameters() if f".{agent.actor.adapter}." in name]
        pairs = zip(names, agent.actor.parameters())
        return max(float(x.detach().abs().max()) for name, x in pairs if ".lora_B." in name)
    pairs = zip(agent.actor.parameters(), initial.parameters())
    return max(float((new - old).detach().abs().max()) for new, old in pairs)


@torch.no_grad()
def saved_error(agent, folder, run_folder):
    """The largest difference of logits between an agent and what transformers, or peft, opens in the run's folder."""
    ids = torch.arange(12)[None] * 5
    if agent.actor.adapter is None:
        saved = AutoModelForCausalLM.from_pretrained(f"{run_folder}/agent_0")
    else:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        saved = peft.PeftModel.from_pretrained(base, f"{run_folder}/agent_0/actor")
    with agent.actor.active():
        return float((saved.eval()(ids).logits - agent.actor.base(ids).logits).abs().max())


def check(name, folder, kind):
    """What came of an agent of an architecture, by name; `kind` is whole or adapters, `folder` a new one."""
    with torch.random.fork_rng():
        initial = save_model(name, f"{folder}/model")
    agent = train(f"{folder}/model", f"{folder}/{kind}", RANKS[kind])
    result = {
        "recomputes": getattr(agent.actor.base, "recomputes", False),
        "change": weight_change(agent, initial),
        "saved": saved_error(agent, f"{folder}/model", f"{folder}/{kind}"),
    }
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # an update of that rate leaves adapters near 0
        for parameter in [*agent.actor.parameters(), *agent.critic.parameters()]:
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    errors, gradients = zip(reading_error(agent.actor), reading_error(agent.critic))
    result |= {"read": max(errors), "gradient": max(gradients), "sampled": sampling_error(agent.actor)}
    result["merged"] = agent.actor.adapter is not None and bool(agent.actor.model.mergeable)
    return result


def slowdown(model):
    """How many times as long a model samples whose rows are computed anew, against its own cache; None: it has none."""
    ids = torch.arange(32 * 16).view(32, 16) % 700 + 3
    seconds = []
    for recomputes in (False, True):
        model.recomputes = recomputes
        try:
            sample_all(model, ids[:, :4], 2)
        except Exception:  # of a cache that is none
            return None
        start = time.perf_counter()
        sample_all(model, ids, 48)
        seconds.append(time.perf_counter() - start)
    return seconds[1] / seconds[0]


@torch.no_grad()
def sample_all(model, input_ids, count):
    """Take the likeliest token so many times."""
    mask = torch.ones_like(input_ids)
    cache = None
    for _ in range(count):
        out = causal_lm.forward(model, input_ids, mask, cache, keep=1, use_cache=True)
        cache = out.cache
        cache.reorder_cache(torch.arange(len(mask)))
        input_ids = out.logits[:, -1:].argmax(-1)
        mask = pad(mask, (0, 1), value=1)


def save_model(name, folder):
    """Write a random model of an architecture, with a tokenizer, in a folder; returns the model."""
    model = make_model(name)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(locate(TOKENIZER)).save_pretrained(folder)
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ARCHITECTURES), help="architectures, by transformers' name")
    flags = parser.parse_args()
    for name in flags.names:
        if name not in ARCHITECTURES:
            parser.error(f"{name} is none of {', '.join(ARCHITECTURES)}")
    transformers.logging.set_verbosity_error()
    print("| architecture | whole | adapters | gradients | weights change | saved | merged | padding |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in flags.names:
        results = {}
        for kind in RANKS:
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
                results[kind] = check(name, folder, kind)
        print(row(name, results), flush=True)


def row(name, results):
    """A row of the table."""
    each = list(results.values())
    cells = [name]
    cells += [f"{max(result['read'], result['sampled']):.0e}" for result in each]
    cells.append(f"{max(result['gradient'] for result in each):.0e}")
    cells.append(f"{min(result['change'] for result in each):.0e}")
    cells.append(f"{max(result['saved'] for result in each):.0e}")
    cells.append("yes" if results["adapters"]["merged"] else "no")
    if not results["whole"]["recomputes"]:
        cells.append("yes")
    else:
        times = slowdown(make_model(name))
        cells.append("no, and no cache" if times is None else f"no: {times:.1f} times as long")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
