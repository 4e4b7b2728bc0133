"""Every script with vLLM's CPU build as its sampler: python -m pytest -m vllm, where it is installed."""

import copy
import random
import shutil

import numpy
import peft
import pytest
import torch
from helpers import make_agent, make_args, make_ppo_agents, make_ppo_args, read_metrics, seeded
from processes import assert_same, finish, finish_two
from safetensors.torch import load_file
from short_runs import SCRIPTS
from transformers import AutoModelForCausalLM

import iac_llm
import ippo_llm
import ppo_llm
from utils.cli import UserError
from utils.models import engine
from utils.models.engine import Engine

pytestmark = pytest.mark.vllm
TEAM = pytest.mark.parametrize("script", [ippo_llm, iac_llm], ids=["ippo", "iac"])
EVERY_SCRIPT = pytest.mark.parametrize("script", SCRIPTS)
CHAT = [{"role": "user", "content": "Summarise this post in about 16 words: my uncle took my car."}]
EIGHT_UPDATES = {"train_size": 32, "rollout_buffer_size": 4, "num_train_epochs": 1, "num_agents": 2, "task": "number"}
TEAM_FLAGS = EIGHT_UPDATES | {"mini_batch_size": 4, "max_new_tokens": 4, "eval_interval": 4, "eval_size": 4}
PPO_FLAGS = EIGHT_UPDATES | {"batch_size": 4, "max_output_tokens": 4, "evaluation_interval": 4, "eval_size": 4}
GROUPS = TEAM_FLAGS | {"num_generations": 4, "train_size": 8}
FLAGS = {"ippo": TEAM_FLAGS, "iac": TEAM_FLAGS, "maac": TEAM_FLAGS, "magrpo": GROUPS, "ppo": PPO_FLAGS}
GREEDY_TEAM = {"do_sample": False, "actor_learning_rate": 1e-4, "critic_learning_rate": 1e-4, "adam_epsilon": 1e-5}
GREEDY = dict.fromkeys(("ippo", "iac"), GREEDY_TEAM) | {"ppo": {"top_k": 1, "lr_actor": 5e-5}}
# Where all answers are the same a mean reward of 0 teaches a team's critic nothing but rounding.
GREEDY["maac"] = GREEDY_TEAM | {"reward_normalization": False, "advantage_normalization": False}
# All answers of a group are the same: what they earn is compared with nothing.
GREEDY["magrpo"] = {name: x for name, x in GREEDY_TEAM.items() if "critic" not in name} | {"advantage_mode": "raw"}


def shake(model, seed, scale=0.02):
    """The model, with other weights."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def train(script, folder, **flags):
    """The folder of a run with vLLM."""
    module = SCRIPTS[script]
    module.main(module.Args(**(FLAGS[script] | {"use_vllm": True, "output_dir": str(folder)} | flags)))
    return folder


def make_ppo(model, tokenizer, **flags):
    """Two agents of ppo_llm with an engine, whose adapters are not 0, and the flags."""
    args = ppo_llm.resolve_args(make_ppo_args(task="tldr", num_agents=2, use_vllm=True, max_output_tokens=24, **flags))
    return make_ppo_agents(model, tokenizer, args), args


def prompt_ids(prompts, tokenizer):
    return tokenizer(prompts, add_special_tokens=False).input_ids


def own_logprobs(script, agent, rollout, args):
    """Log-probabilities as learning has them, 0 where nothing was sampled."""
    return script.compute_logprobs(agent.actor, rollout, args) * rollout.response_mask


def assert_near(script, agent, rollout, args):
    """The sampler's log-probabilities are those that are learned from, to 1e-4."""
    right = own_logprobs(script, agent, rollout, args)
    torch.testing.assert_close(rollout.sampler_logprobs, right, atol=1e-4, rtol=0)


# --- What is sampled --------------------------------------------------------------------------------------------------


@TEAM
def test_logprobs_of_a_team_are_those_of_learning(script, model, tokenizer, prompts):
    args = make_args(script=script, use_vllm=True, temperature=0.7, max_new_tokens=40)
    agent = make_agent(args, model, tokenizer, script=script)
    shake(agent.actor, seed=1)
    rollout = script.sample(agent, prompts, args, seeded())
    assert len(set(rollout.response_mask.sum(-1).flatten().tolist())) > 1
    assert_near(script, agent, rollout, args)
    L = int(rollout.response_mask[2].sum())
    ids = prompt_ids(prompts[2:3], tokenizer)[0] + rollout.response_ids[2, 0, :L].tolist()
    with torch.no_grad():
        out = agent.actor(torch.tensor([ids[:-1]]), output_hidden_states=True)
        logprobs = (out.logits[0, -L:] / 0.7).log_softmax(-1).gather(1, torch.tensor(ids[-L:])[:, None]).squeeze(1)
        values = agent.value_head(out.hidden_states[-1][0, -L:])
    own = own_logprobs(script, agent, rollout, args)
    torch.testing.assert_close(own[2, 0, :L], logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(script.compute_values(agent, rollout, args)[2, 0, :L], values, atol=1e-5, rtol=0)


def test_logprobs_of_adapters_are_those_of_learning(model, tokenizer, prompts):
    agents, args = make_ppo(model, tokenizer, temperature=0.7)
    ids = prompt_ids(prompts, tokenizer)
    transcripts = [[ppo_llm.Transcript([""], prompt) for prompt in ids] for _ in agents]
    agents[0].engine.hand_over_adapters(agents)
    ppo_llm.respond(agents, transcripts, args, seeded())
    for agent, own in zip(agents, transcripts):
        for prompt, transcript in zip(ids, own):
            tokens = torch.tensor([transcript.ids])
            with torch.no_grad():
                logits = ppo_llm.adapters.forward(agent.model, agent.actor, input_ids=tokens).logits
            log_pi = (logits[0, len(prompt) - 1 : -1] / 0.7).log_softmax(-1)
            right = log_pi.gather(1, torch.tensor(transcript.response_ids)[:, None]).squeeze(1)
            torch.testing.assert_close(torch.tensor(transcript.logprobs), right, atol=1e-4, rtol=0)


def test_logprobs_of_several_turns_are_those_of_learning(model, tokenizer):
    flags = {"task": "number", "num_agents": 2, "max_turns": 3, "max_output_tokens": 4, "max_model_len": 400}
    args = ppo_llm.resolve_args(make_ppo_args(use_vllm=True, **flags))
    agents = make_ppo_agents(model, tokenizer, args)
    task = ppo_llm.tasks.load_task("number", 2, 3)
    rollouts = ppo_llm.play(agents, task, [*task.eval_dataset(6, 0)], args, seeded())
    for agent, rollout in zip(agents, rollouts):
        assert rollout.played.all(1).any()  # three turns in one transcript
        assert_near(ppo_llm, agent, rollout, args)


def test_tokens_follow_the_probabilities(model, tokenizer, prompts):
    args = make_args(use_vllm=True, max_new_tokens=1)
    agent = make_agent(args, model, tokenizer)
    rollout = ippo_llm.sample(agent, prompts[:1] * 4000, args, seeded())
    own = ippo_llm.sample(agent, prompts[:1] * 4000, make_args(max_new_tokens=1), seeded())
    counts = torch.bincount(rollout.response_ids.flatten(), minlength=len(tokenizer))
    own_counts = torch.bincount(own.response_ids.flatten(), minlength=len(tokenizer))
    torch.testing.assert_close(counts / 4000, own_counts / 4000, atol=0.04, rtol=0)


def test_with_top_p_logprobs_are_of_the_tokens_that_are_left(model, tokenizer, prompts):
    args = make_args(use_vllm=True, top_p=0.6, max_new_tokens=8)
    agent = make_agent(args, model, tokenizer)
    rollout = ippo_llm.sample(agent, prompts, args, seeded())
    ratio = (own_logprobs(ippo_llm, agent, rollout, args) - rollout.sampler_logprobs).exp()
    ratio = ratio[rollout.response_mask > 0]  # the share that is left
    assert (ratio > 0.59).all() and (ratio < 1 + 1e-4).all() and ratio.min() < 0.99


@TEAM
def test_two_agents_have_their_own_weights(script, model, tokenizer, prompts):
    args = make_args(script=script, use_vllm=True)
    agents = [make_agent(args, model, tokenizer, script=script) for _ in range(2)]
    assert agents[0].engine is agents[1].engine
    for i, agent in enumerate(agents):
        shake(agent.actor, seed=i)
    for _ in range(2):
        rollouts = [script.sample(agent, prompts, args, seeded()) for agent in agents]
        for agent, rollout in zip(agents, rollouts):
            assert_near(script, agent, rollout, args)
        other = own_logprobs(script, agents[1], rollouts[0], args)
        assert (other - rollouts[0].sampler_logprobs).abs().max() > 0.1


def test_agents_of_two_architectures_have_an_engine_each(tokenizer, model, prompts, tmp_path):
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    model.save_pretrained(tmp_path / "two")
    tokenizer.save_pretrained(tmp_path / "two")
    type(model)(config).save_pretrained(tmp_path / "one")
    tokenizer.save_pretrained(tmp_path / "one")
    args = make_args(use_vllm=True, model=(str(tmp_path / "two"), str(tmp_path / "one")))
    agents = ippo_llm.build_agents(args, torch.device("cpu"), 1)
    assert agents[0].engine is not agents[1].engine
    for agent in (*agents, agents[0]):
        rollout = ippo_llm.sample(agent, prompts, args, seeded())
        assert_near(ippo_llm, agent, rollout, args)


@TEAM
def test_weights_in_bfloat16_are_near(script, model, tokenizer, prompts):
    args = make_args(script=script, use_vllm=True, mixed_precision="bf16")
    agent = make_agent(args, model, tokenizer, script=script)
    rollout = script.sample(agent, prompts, args, seeded())
    assert (rollout.sampler_logprobs - own_logprobs(script, agent, rollout, args)).abs().mean() < 0.05


@EVERY_SCRIPT
def test_act_answers_as_without(script):
    module = SCRIPTS[script]
    answers = []
    for use_vllm in (True, False):
        args = module.Args(use_vllm=use_vllm, **FLAGS[script])
        if script == "ppo":
            args = ppo_llm.resolve_args(args)
        torch.manual_seed(0)
        agents = module.build_agents(args, torch.device("cpu"), 1)
        answers.append(module.act(agents[1], [CHAT, "I think"], args, greedy=True))
    assert answers[0] == answers[1] and len(answers[0]) == 2


@EVERY_SCRIPT
def test_act_without_a_generator_draws_from_torchs_own(script):
    module = SCRIPTS[script]
    args = module.Args(use_vllm=True, **FLAGS[script])
    if script == "ppo":
        args = ppo_llm.resolve_args(args)
    agent = module.build_agents(args, torch.device("cpu"), 1)[0]
    answers = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        answers.append(module.act(agent, [CHAT] * 8, args))
    assert answers[0] == answers[1] != answers[2]
    assert len(set(answers[0])) > 1


# --- What is handed over ----------------------------------------------------------------------------------------------


def test_weights_that_do_not_arrive_are_seen(model, tokenizer, prompts, monkeypatch):
    args = make_args(use_vllm=True)
    agent = make_agent(args, model, tokenizer)
    ippo_llm.sample(agent, prompts, args, seeded())
    shake(agent.actor, seed=1, scale=0.003)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "load_weights", lambda *_: None)
        with pytest.raises(UserError, match="^--use-vllm: the weights in the engine are not those that were handed"):
            ippo_llm.sample(agent, prompts, args, seeded())
    ippo_llm.sample(agent, prompts, args, seeded())


def test_an_output_layer_that_does_not_arrive_is_seen(model, tokenizer, prompts, monkeypatch):
    args = make_args(use_vllm=True)
    agent = make_agent(args, model, tokenizer)
    ippo_llm.sample(agent, prompts, args, seeded())
    load_weights = Engine.load_weights
    embeddings = copy.deepcopy(agent.actor.get_input_embeddings().weight.data)
    shake(agent.actor, seed=1, scale=0.003)

    def load_all_but_embeddings(self, actor):
        stale = copy.deepcopy(actor)
        stale.get_input_embeddings().weight.data.copy_(embeddings)
        load_weights(self, stale)

    monkeypatch.setattr(Engine, "load_weights", load_all_but_embeddings)
    with pytest.raises(UserError, match="^--use-vllm: the weights in the engine are not those that were handed"):
        ippo_llm.sample(agent, prompts, args, seeded())


def test_adapters_that_do_not_arrive_are_seen(model, tokenizer, monkeypatch):
    agents, args = make_ppo(model, tokenizer)
    agents[0].engine.hand_over_adapters(agents)
    with torch.no_grad():
        for parameter in ppo_llm.adapters.parameters(agents[1].model, agents[1].actor):
            parameter.mul_(1.5)
    monkeypatch.setattr(Engine, "load_adapter", lambda *_: None)
    with pytest.raises(UserError, match="^--use-vllm: the weights in the engine are not those that were handed"):
        agents[0].engine.hand_over_adapters(agents)


def test_what_the_cache_has_of_old_weights_is_forgotten(model, tokenizer, prompts):
    args = make_args(use_vllm=True, vllm_config={"enable_prefix_caching": True, "max_model_len": 512})
    agent = make_agent(args, model, tokenizer)
    long = [" ".join(prompts * 2)[:1200]] * 2
    for seed in range(3):
        shake(agent.actor, seed)
        rollout = ippo_llm.sample(agent, long, args, seeded())
        prompt_tokens = rollout.attention_mask.sum() - rollout.response_mask.sum()
        assert prompt_tokens > 2 * 128  # more than a block of the cache
        assert_near(ippo_llm, agent, rollout, args)


def test_an_engine_leaves_the_random_generators_as_they_are(model):
    args = make_args(use_vllm=True, vllm_config={"max_num_seqs": 7})  # an engine of its own
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    sampler = engine.get_engine(model, args, "max_new_tokens")
    sampler.load_weights(model)
    sampler.sample([[5, 6, 7]], 4, [2], args, seeded())
    assert before == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


# --- Runs -------------------------------------------------------------------------------------------------------------


def assert_same_weights(one, other):
    """The agents of two runs, to 1e-4."""
    paths = [*one.glob("agent_*/**/*.safetensors"), *one.glob("critic/*.safetensors")]
    files = sorted(path.relative_to(one) for path in paths)
    files = [path for path in files if "optimizer" not in path.name]
    assert len(files) >= (2 if one.name.endswith("magrpo") else 4)
    for file in files:
        right = load_file(one / file)
        for name, weight in load_file(other / file).items():
            torch.testing.assert_close(weight, right[name], atol=1e-4, rtol=0)


@EVERY_SCRIPT
def test_greedy_it_learns_what_a_run_without_learns(script, tmp_path):
    flags = GREEDY[script]
    correction = script != "ppo"  # with --top-k 1 a token would weigh its own probability
    run = train(script, tmp_path / "vllm", sampler_correction=correction, **flags)
    right = train(script, tmp_path / f"own_{script}", use_vllm=False, **flags)
    assert len(read_metrics(right)) == 8
    assert_same_weights(right, run)


@EVERY_SCRIPT
def test_the_same_seed_gives_the_same_run_and_a_run_goes_on_to_the_same_bits(script, tmp_path):
    module = SCRIPTS[script]
    whole = train(script, tmp_path / "whole", save_interval=4)
    assert_same(whole, train(script, tmp_path / "again"))
    ratios = [float(row["agent_1/sampler_ratio"]) for row in read_metrics(whole)]
    assert ratios == pytest.approx([1.0] * 8, abs=1e-4)
    begun = tmp_path / "begun"
    shutil.copytree(whole, begun)
    for path in begun.glob("checkpoints/*8*"):
        shutil.rmtree(path)
    args = module.Args(**(FLAGS[script] | {"use_vllm": True, "save_interval": 4, "resume": str(begun)}))
    module.main(args)
    assert_same(whole, begun)


def test_what_a_run_saves_opens_in_transformers_and_peft(tmp_path):
    folder = train("ippo", tmp_path / "ippo", train_size=4)
    assert AutoModelForCausalLM.from_pretrained(folder / "agent_1").num_parameters() > 0
    folder = train("ppo", tmp_path / "ppo", train_size=4)
    base = AutoModelForCausalLM.from_pretrained("utils/tiny_lm")
    assert peft.PeftModel.from_pretrained(base, folder / "agent_1/actor").active_adapter == "default"


TWO = "--task number --train-size 16 --rollout-buffer-size 4 --num-train-epochs 2 --num-agents 2"
TWO_TEAM = f"{TWO} --mini-batch-size 4 --eval-interval 0 --no-do-sample --max-new-tokens 4 --adam-epsilon 1e-5"
TWO_COMMANDS = {
    "ippo_llm": f"{TWO_TEAM} --actor-learning-rate 1e-4 --critic-learning-rate 1e-4",
    "iac_llm": f"{TWO_TEAM} --actor-learning-rate 1e-4 --critic-learning-rate 1e-4",
    "maac_llm": f"{TWO_TEAM} --actor-learning-rate 1e-4 --critic-learning-rate 1e-4 --no-reward-normalization",
    "magrpo_llm": f"{TWO_TEAM} --train-size 8 --actor-learning-rate 1e-4 --num-generations 2 --advantage-mode raw",
    "ppo_llm": f"{TWO} --batch-size 4 --evaluation-interval 0 --top-k 1 --max-output-tokens 4 --lr-actor 1e-4",
}


@pytest.mark.parametrize("shard", [[], ["--shard"]], ids=["whole", "sharded"])
@pytest.mark.parametrize("script", TWO_COMMANDS)
def test_two_processes_have_an_engine_each(script, shard, tmp_path):
    flags = TWO_COMMANDS[script].split()
    one = tmp_path / f"one_{script.removesuffix('_llm')}"
    finish(script, *flags, "--output-dir", one)
    sampled = ["--use-vllm", "--no-sampler-correction"]
    finish_two(script, *flags, "--output-dir", tmp_path / "two", *sampled, *shard, seconds=300)
    assert_same_weights(one, tmp_path / "two")


def mean(rows):
    return sum(float(row["reward_mean"]) for row in rows) / len(rows)


@pytest.mark.parametrize("seed", [1, 2])
@TEAM
def test_a_team_meets_the_number_better_within_a_few_updates(script, seed, tmp_path):
    flags = {"num_turns": 3, "max_new_tokens": 4, "train_size": 768, "num_train_epochs": 1, "eval_interval": 0}
    rewards = []
    for use_vllm in (True, False):
        folder = tmp_path / str(use_vllm)
        script.main(script.Args(task="number", seed=seed, use_vllm=use_vllm, output_dir=str(folder), **flags))
        rows = read_metrics(folder)
        assert len(rows) == 768 // script.Args().rollout_buffer_size
        assert mean(rows[-4:]) > mean(rows[:2]) + 0.1
        rewards.append(mean(rows[-4:]))
    assert rewards[0] == pytest.approx(rewards[1], abs=0.2)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_player_guesses_better_within_a_few_updates(seed, tmp_path):
    flags = {"train_size": 960, "num_train_epochs": 1, "evaluation_interval": 0}
    rewards = []
    for use_vllm in (True, False):
        folder = tmp_path / str(use_vllm)
        ppo_llm.main(ppo_llm.Args(seed=seed, use_vllm=use_vllm, output_dir=str(folder), **flags))
        rows = read_metrics(folder)
        assert len(rows) == 15 and mean(rows[-4:]) > mean(rows[:2]) + 0.12
        rewards.append(mean(rows[-4:]))
    assert rewards[0] == pytest.approx(rewards[1], abs=0.2)


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"max_num_seq": 8}, "^--vllm-config takes settings of vllm.EngineArgs, got max_num_seq$"),
        ({"model": "x"}, "^--vllm-config model: it can't be set"),
        ({"logprobs_mode": "raw_logprobs"}, "^--vllm-config logprobs_mode: it can't be set"),
        ({"dtype": "nonsense"}, "^--use-vllm: the engine does not start: .*nonsense"),
    ],
)
@EVERY_SCRIPT
def test_settings_that_vllm_does_not_have_are_one_line(script, settings, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train(script, tmp_path / "run", vllm_config=settings)
    assert not (tmp_path / "run").exists()


@EVERY_SCRIPT
def test_prompts_without_room_in_the_engine_are_one_line(script, tmp_path):
    items = FLAGS[script]["train_size"] + 4
    with pytest.raises(UserError, match=f"^{items} of {items} items are left out: a prompt has more than 16 tokens"):
        train(script, tmp_path / "run", vllm_config={"max_model_len": 20})
    assert not (tmp_path / "run").exists()


def test_a_temperature_that_vllm_would_raise_is_one_line(model, tokenizer, prompts):
    args = make_args(use_vllm=True, temperature=0.005)
    with pytest.raises(UserError, match="^--use-vllm takes a temperature from 0.01, got 0.005$"):
        ippo_llm.sample(make_agent(args, model, tokenizer), prompts, args, seeded())


def test_adapters_of_several_ranks_and_scalings_are_those_of_learning(model, tokenizer, tmp_path):
    path = tmp_path / "lora.json"
    path.write_text('{"r": 8, "rank_pattern": {"q_proj": 12}, "alpha_pattern": {"v_proj": 40.0}, "use_rslora": true}')
    agents, args = make_ppo(model, tokenizer, lora_config=str(path), lora_rank=16, lora_alpha=32.0)
    agents[0].engine.hand_over_adapters(agents)  # which compares log-probabilities


@pytest.mark.parametrize("content", ['{"r": 8, "use_dora": true}', '{"r": 8, "modules_to_save": ["lm_head"]}'])
def test_adapters_that_vllm_does_not_have_are_one_line(content, tmp_path):
    path = tmp_path / "lora.json"
    path.write_text(content)
    with pytest.raises(UserError, match="^--use-vllm takes no adapters with (use_dora|modules_to_save)"):
        train("ppo", tmp_path / "run", lora_config=str(path))
