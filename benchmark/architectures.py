"""Try the scripts with tiny random models of many architectures, and write down what each can do.

python -m benchmark.architectures                     all of them; prints the table of docs/architectures.md
python -m benchmark.architectures llama mamba         these

Of each: the largest difference of the log-probabilities that a script samples with from those of each sequence read
alone, without padding or cache; whether an update changes the weights; whether what is saved opens with the same
logits; and, where a model takes no padding, how many times as long it samples as it would with its cache.
"""

import argparse
import contextlib
import io
import tempfile
import time

import peft
import torch
import transformers
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from utils import models, tasks
from utils.models import causal_lm
from utils.models.loading import locate

SCRIPTS = {"ippo": ippo_llm, "iac": iac_llm, "maac": maac_llm, "magrpo": magrpo_llm, "ppo": ppo_llm}
PRINTED = ("ippo", "iac", "ppo")  # maac and magrpo sample with the functions of the others; the tests try them
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
    """Prompts of one to eight words; a response earns its share of different characters."""

    __name__ = "words"

    def train_dataset(self, size, seed):
        return [{"prompt": "word " * (1 + k % 8)} for k in range(size)]

    def formatters(self, item):
        return item["prompt"]

    def reward_func(self, responses):
        return [len(set(text)) / max(1, len(text)) for text in responses]


def make_args(script, folder, output_dir):
    """Flags of a run of one update, on eight prompts."""
    generations = 2 if script is magrpo_llm else 1
    flags = {"use_separate_critic": True} if script in (iac_llm, ppo_llm) else {}
    return script.Args(
        model=(folder,),
        num_agents=1,
        train_size=8,
        num_train_epochs=1,
        num_generations=generations,
        rollout_buffer_size=8 * generations,
        mini_batch_size=4,
        max_new_tokens=NEW_TOKENS,
        eval_interval=0,
        output_dir=output_dir,
        **flags,
    )


def check_script(script, folder, output_dir):
    """Train a script's agent with the model in a folder for one update; what came of it, by name."""
    agents, run = script.main(make_args(script, folder, output_dir), task=Task())
    agent = agents[0]
    items = Task().train_dataset(8, 0)
    task = tasks.load_task(Task(), run.args, script)
    (rollout,) = script.play([agent], task, items, run.args, torch.Generator().manual_seed(1))
    with models.sampling([agent], run.args):
        sampled = replay(agent, rollout)
    is_sampled = rollout.turns > 0
    with torch.no_grad():
        out = agent.actor.read(rollout.ids, rollout.attention_mask, where=is_sampled)
    recomputed = out.logits.float().log_softmax(-1).gather(1, rollout.ids[is_sampled][:, None])[:, 0]
    alone = logprobs_alone(agent, rollout)
    return {
        "recomputes": getattr(agent.actor.base, "recomputes", False),
        "lengths": sorted(is_sampled.sum(1).tolist()),
        "sampled": float((sampled - alone).abs().max()),
        "recomputed": float((recomputed - alone[is_sampled]).abs().max()),
        "change": weight_change(agent),
        "saved": saved_difference(agent, folder, run.folder),
    }


@torch.no_grad()
def replay(agent, rollout):
    """log pi of the sampled tokens [B, S] as `generate` computes it: padded on the left, with a cache; 0 elsewhere."""
    logprobs = torch.zeros(rollout.ids.shape)
    starts = (rollout.turns > 0).int().argmax(1)
    lengths = rollout.attention_mask.sum(1)
    contexts = [ids[:start].tolist() for ids, start in zip(rollout.ids, starts)]
    ids, mask = models.pad_left(contexts, agent)
    rows = torch.arange(len(contexts))
    cache = None
    for step in range(NEW_TOKENS):
        out = agent.actor.next_token(ids, mask, cache)
        columns = starts[rows] + step
        tokens = rollout.ids[rows, columns]
        logprobs[rows, columns] = out.logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        goes_on = columns + 1 < lengths[rows]
        if not goes_on.any():
            break
        rows = rows[goes_on]
        cache = out.cache.select(goes_on)
        ids = torch.cat([ids, tokens[:, None]], 1)[goes_on]
        mask = pad(mask[goes_on], (0, 1), value=1)
    return logprobs


@torch.no_grad()
def logprobs_alone(agent, rollout):
    """log pi of the sampled tokens [B, S], each sequence in a batch of its own, without padding, mask or cache."""
    logprobs = torch.zeros(rollout.ids.shape)
    with agent.actor.active():
        for row, (ids, turns) in enumerate(zip(rollout.ids, rollout.turns)):
            length = int(rollout.attention_mask[row].sum())
            log_pi = agent.actor.base(ids[None, :length], use_cache=False).logits[0, :-1].log_softmax(-1)
            logprobs[row, 1:length] = log_pi.gather(1, ids[1:length, None])[:, 0]
    return logprobs * (rollout.turns > 0)


def weight_change(agent):
    """The largest change of a weight in the update."""
    if agent.actor.adapter is None:
        pairs = zip(agent.actor.model.parameters(), agent.reference.model.parameters())
    else:
        pairs = zip(agent.actor.parameters(), agent.reference.parameters())
    return max(float((new - old).detach().abs().max()) for new, old in pairs)


@torch.no_grad()
def saved_difference(agent, folder, run_folder):
    """The largest difference of logits between an agent and what transformers, or peft, opens in the run's folder."""
    ids = torch.arange(12)[None] * 5
    with agent.actor.active():
        logits = agent.actor.base(ids).logits
    if agent.actor.adapter is None:
        saved = AutoModelForCausalLM.from_pretrained(run_folder / "agent_0")
    else:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        saved = peft.PeftModel.from_pretrained(base, run_folder / "agent_0" / "actor")
    return float((saved.eval()(ids).logits - logits).abs().max())


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
    print(f"| architecture | {' | '.join(PRINTED)} | weights change | saved | padding |")
    print(f"| --- |{' --- |' * len(PRINTED)} --- | --- | --- |")
    for name in flags.names:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            model = save_model(name, f"{folder}/model")
            results = {}
            for label in PRINTED:
                results[label] = check_script(SCRIPTS[label], f"{folder}/model", f"{folder}/{label}")
        print(row(name, model, results), flush=True)


def row(name, model, results):
    """A row of the table."""
    first = results["ippo"]
    cells = [name]
    for result in results.values():
        cells.append(f"{max(result['sampled'], result['recomputed']):.0e}")
    cells.append(f"{min(result['change'] for result in results.values()):.0e}")
    cells.append(f"{max(result['saved'] for result in results.values()):.0e}")
    if not first["recomputes"]:
        cells.append("yes")
    else:
        times = slowdown(model)
        cells.append("no, and no cache" if times is None else f"no: {times:.1f} times as long")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
