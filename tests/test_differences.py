"""docs/differences.md has every item of the pages that the scripts are built from; "the same" is run."""

import functools
import inspect
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from helpers import change_adapters, make_team, same_tensors, seeded, tiny_base
from short_runs import FLAGS, small_model, train

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from utils.cli import UserError, flag_name
from utils.load import load
from utils.models import adapters
from utils.population import PopulationArgs
from utils.tasks import load_task

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/differences.md").read_text()
CONFIG = """output_dir actor_learning_rate critic_learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon
max_grad_norm rollout_buffer_size mini_batch_size {epochs} value_clip_range value_loss_coef entropy_coef
advantage_normalization max_new_tokens temperature top_p top_k do_sample num_train_epochs per_device_train_batch_size
use_separate_critic critic_model_name_or_path critic_value_head_hidden_dim value_head_hidden_dim num_agents num_turns
reward_norm_eps"""
TRAINER = """model tokenizer reward_func reward_processor formatters args train_dataset eval_dataset model_config
wandb_config metrics_callback"""
MAAC = """agent_learning_rate critic_learning_rate rollout_buffer_size train_batch_size value_loss_coef
advantage_normalization max_new_tokens temperature top_p top_k num_train_epochs num_agents num_generations num_turns
discount critic_type early_termination_threshold external_prompt_passthrough eval_interval eval_num_samples
eval_batch_size logging_steps reference_kl_enabled reference_kl_coef reference_devices parallel_training agent_devices
critic_devices agent_model agents critic_model critics tokenizer reward_func reward_processor formatters args
train_dataset eval_dataset model_config wandb_config metrics_callback external_transition"""
MAGRPO = """agent_learning_rate rollout_buffer_size train_batch_size advantage_mode advantage_normalization joint_mode
max_new_tokens temperature top_p top_k num_train_epochs num_agents num_generations num_turns discount
early_termination_threshold external_prompt_passthrough eval_interval eval_num_samples eval_batch_size logging_steps
reference_kl_enabled reference_kl_coef reference_devices parallel_training agent_devices agent_model agents tokenizer
reward_func reward_processor formatters args train_dataset eval_dataset model_config wandb_config metrics_callback
external_transition eval_logger eval_aggregator"""
LLMPPO = """LLMPPO device_map torch_dtype env tokenizer obs training experiences turn_ids size observation_space
action_space wrapper_cls wrapper_kwargs finetune_llm_reasoning finetune_llm_multiturn ReasoningGym train_dataset
test_dataset reward_fn conversation_template data_batch_size_per_gpu pop max_steps evaluation_interval env_factory
TokenObservationWrapper max_turns save_llm_checkpoint pad_token_id pad_token model_name actor_network model_config
hp_config index batch_size beta vf_coef clip_coef gamma gae_lambda lr_actor lr_critic max_grad_norm update_epochs
temperature repetition_penalty top_p top_k min_p use_separate_reference_adapter calc_position_embeddings
micro_batch_size_per_gpu max_output_tokens min_output_tokens max_model_len hf_generate_chunk_size lora_config
cosine_lr_schedule_config accelerator device wrap clone use_vllm use_memory_efficient_params vllm_config seed
turn_level_clip action_granularity turn_value_reduction adv_whitening gradient_checkpointing torch_compiler
copy_attributes evolvable_attributes get_action get_action_dim get_policy get_state_dim inspect_attributes learn load
load_checkpoint load_optimizer overwrite_reference_adapter overwrite_critic_adapter merge_lora_configs population
preprocess_observation recompile register_mutation_hook register_network_group reinit_optimizers save_checkpoint
lora_only save_optimizer select_adapter set_reference_policy set_training_mode test loop to_device update_lr
use_adapter"""
pytestmark = pytest.mark.usefixtures("in_tmp_path")
SECTIONS = {
    "CoMLRL's Multi-Agent PPO and Multi-Agent Actor-Critic": (ippo_llm, iac_llm),
    "CoMLRL's MAACConfig and MAGRPOConfig": (maac_llm, magrpo_llm),
    "AgileRL's LLMPPO": (ppo_llm,),
}


def rows(title):
    """The rows of a table: on the page, here, how; each a string."""
    section = PAGE.split(f"## Item by item: {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| (.*?) \| (.*?) ?\| (.*) \|$", section, flags=re.M)


def items(title):
    """What a page names, in the order of the table."""
    return [name for page, _, _ in rows(title) for name in re.findall(r"`(\w+)`", page)]


@pytest.mark.parametrize("epochs", ["ppo_epochs", "ac_epochs"])
def test_every_item_of_comlrls_pages_is_there_in_order(epochs):
    names = CONFIG.format(epochs=epochs).split() + TRAINER.split()
    page_items = items("CoMLRL's Multi-Agent PPO and Multi-Agent Actor-Critic")
    assert [name for name in page_items if name in names] == names


def test_every_parameter_of_comlrls_configurations_is_there():
    assert set(items("CoMLRL's MAACConfig and MAGRPOConfig")) == {*MAAC.split(), *MAGRPO.split()}


def test_every_item_of_agilerls_page_is_there():
    assert not set(LLMPPO.split()) - set(items("AgileRL's LLMPPO"))


@pytest.mark.parametrize("title", SECTIONS)
def test_every_item_has_an_answer(title):
    for page, here, answer in rows(title):
        assert answer.startswith(("the same", "differs: ", "not here: ", "each cell is in ")), page
        assert bool(here) != answer.startswith("not here: ")


@pytest.mark.parametrize("title", SECTIONS)
def test_the_flags_that_it_names_are_there(title):
    programs = [script.Args() for script in SECTIONS[title]] + [PopulationArgs()]
    flags = {flag_name(name) for args in programs for name in vars(args)}
    for _, here, answer in rows(title):
        assert not set(re.findall(r"`(--[a-z0-9-]+)`", here + answer)) - flags


# --- "The same", flag by flag -----------------------------------------------------------------------------------------

PAGE_VALUES = {  # what the pages give a flag, by its type there
    3: """rollout_buffer_size mini_batch_size ppo_epochs ac_epochs max_new_tokens top_k num_train_epochs num_agents
        num_generations num_turns critic_value_head_hidden_dim value_head_hidden_dim max_steps evaluation_interval
        max_turns batch_size
        update_epochs micro_batch_size_per_gpu max_output_tokens min_output_tokens max_model_len seed""",
    0.5: """actor_learning_rate critic_learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
        value_clip_range value_loss_coef entropy_coef temperature top_p beta vf_coef clip_coef gamma gae_lambda lr_actor
        lr_critic repetition_penalty min_p""",
    True: """advantage_normalization do_sample use_separate_critic use_separate_reference_adapter
        calc_position_embeddings use_vllm turn_level_clip adv_whitening gradient_checkpointing load_optimizer
        save_optimizer merge_lora_configs""",
    "name": "output_dir critic_model_name_or_path model_name",
    "mean": "turn_value_reduction advantage_mode",
    "rloo": "advantage_mode",
    "max": "advantage_mode",
    "raw": "advantage_mode",
    "final_value": "turn_value_reduction",
    "default": "torch_compiler",
    None: "lr_critic micro_batch_size_per_gpu max_output_tokens min_output_tokens max_model_len torch_compiler",
}
PAGE_DEFAULTS = {"load_optimizer": False, "save_optimizer": True, "merge_lora_configs": False}
CODE = "".join(path.read_text() for path in (ROOT / "utils").rglob("*.py"))


def named_flags(text):
    return [flag.replace("-", "_") for flag in re.findall(r"`--([a-z0-9-]+)`", text)]


def scripts_of(here, scripts):
    """The scripts of a row: those that it names, or all of its table."""
    named = [script for script in scripts if f"`{script.__name__}.py`" in here]
    return named or scripts


def same_rows():
    """Of each row that says the same: its table, its items, and what it names here."""
    for title in SECTIONS:
        for page, here, answer in rows(title):
            if answer.startswith("the same"):
                yield pytest.param(title, re.findall(r"`(\w+)`", page) or [page], here, id=page)


@pytest.mark.parametrize("title, names, here", [*same_rows()])
def test_what_is_the_same_is_run(title, names, here):
    """A flag of that name, which takes the page's values, and which the code reads; or a check of the item's own."""
    checked = set()
    for name in names:
        for script in scripts_of(here, SECTIONS[title]):
            check = CHECKS.get((script, name)) or CHECKS.get(name)
            if check:
                check(script)
                checked.add(name)
        if name in named_flags(here):
            check_flag(name, scripts_of(here, SECTIONS[title]))
            checked.add(name)
    assert checked == {*names}


def check_flag(name, scripts):
    values = [value for value, flags in PAGE_VALUES.items() if name in flags.split()]
    assert values
    if True in values:
        values.append(False)
    for script in scripts:
        args = script.Args()
        for value in values:
            shown = (value,) if isinstance(getattr(args, name), tuple) else value
            assert getattr(script.Args(**{name: value}), name) == shown
        assert getattr(args, name) == PAGE_DEFAULTS.get(name, getattr(args, name))
        assert re.search(rf"args\.{name}\b|\"{name}\"", inspect.getsource(script) + CODE)


# --- "The same", item by item -----------------------------------------------------------------------------------------

ROWS = [{"prompt": f"Say {k}.", "question": f"{k} + {k}?", "answer": str(2 * k)} for k in range(12)]
CHAIN = [torch.tensor([x]) for x in ([0.0, 1.0], [0.5, 0.25], [1.0, 1.0])]  # rewards, values, mask


@functools.cache
def agents_of(script, **flags):
    """One agent, or as many as the flags say, of a script on a small model; and the flags."""
    args = script.Args(**({"num_agents": 1} | flags))
    return script.build_agents(args, "cpu", 1, *small_model()), args


@functools.cache
def run_of(script):
    """The run of a team whose task has no formatter, on rows; and what its functions got."""
    name = script.__name__.removesuffix("_llm")
    calls = []

    def metrics_callback(rollouts):
        calls.append(rollouts)
        return {"mine": 7.0}

    task = SimpleNamespace(
        reward_func=lambda *completions: [float(len(text)) for text in completions[0]],
        reward_processor=lambda reward: reward - 100.0,
        metrics_callback=metrics_callback,
    )
    flags = FLAGS[name] | {"train_size": None, "max_steps": 8, "output_dir": f"run of {name}"}
    flags["evaluation_interval" if name == "ppo" else "eval_interval"] = 1
    args = script.Args(**flags)
    _, run = script.main(args, task, *small_model(), train_dataset=ROWS, eval_dataset=ROWS[:2])
    return run, calls


def check_gae(script):
    advantages, returns = script.gae(*CHAIN, 0.9, 0.8)
    expected = [0.9 * 0.25 - 0.5 + 0.9 * 0.8 * (1 - 0.25), 1 - 0.25]
    torch.testing.assert_close(advantages, torch.tensor([expected]))
    torch.testing.assert_close(returns, torch.tensor([expected]) + CHAIN[1])


def check_td_error(script):
    torch.testing.assert_close(script.td_error(*CHAIN, 0.9)[0], torch.tensor([[0.9 * 0.25 - 0.5, 1 - 0.25]]))


def check_learning_rate(script):
    agents, args = agents_of(script, actor_learning_rate=0.25)
    (group,) = agents[0].optimizers[0].param_groups
    assert group["initial_lr"] == 0.25 == args.actor_learning_rate


def check_discount_of_trees(script):
    rewards = torch.tensor([[1.0, 2.0], [1.0, 4.0]])  # two paths that share their first sample
    torch.testing.assert_close(script.tree_returns(rewards, 2, 0.9)[:, 0], torch.tensor([1.0, 1.0]) + 0.9 * 3.0)


def check_separate_critic(script):
    (agent,), _ = agents_of(script, use_separate_critic=True)
    assert agent.critic is not agent.actor and len(agent.optimizers) == 2


def check_value_head(script):
    (agent,), _ = agents_of(script)
    learned = {id(x) for group in agent.optimizers[0].param_groups for x in group["params"]}
    assert agent.critic is None and {id(x) for x in agent.value_head.parameters()} < learned


def check_reward_processor(script):
    _, calls = run_of(script)
    assert all(torch.equal(x.rewards, x.raw_rewards - 100) for rollouts in calls for x in rollouts)


def check_formatters(script):
    _, calls = run_of(script)
    for rollouts in calls:
        for rollout in rollouts:
            assert all(any(row["prompt"] in turns[0] for row in ROWS) for turns in rollout.prompts)


def check_metrics_callback(script):
    run, calls = run_of(script)
    assert [row["mine"] for row in run.rows] == [7.0] * len(calls) and len(calls[0]) == 2


def check_args(script):
    assert inspect.signature(script.main).parameters["args"].default is None


def check_train_dataset(script):
    items = [sample["item"] for sample in run_of(script)[0].samples]
    assert items and all(item in ROWS for item in items)


def check_eval_dataset(script):
    run, _ = run_of(script)
    assert run.rows[0][run.held_out_metric] is not None  # the task has no held-out items of its own


def check_no_ratio(script):
    """The policy's loss knows nothing of the log-probabilities before the update."""
    (agent,), args = agents_of(script)
    rollout = script.sample(agent, ["Say a number."] * 4, args, seeded())
    ones = torch.ones_like(rollout.logprobs)
    extras = {"reference_logprobs": None, "old_values": ones, "returns": ones, "weights": ones}
    counts = {"num_tokens": torch.tensor(9.0), "num_actions": torch.tensor(9.0)}
    batch = script.Batch(**vars(rollout), advantages=ones, action_mask=rollout.response_mask, **extras, **counts)
    loss = getattr(script, f"{script.__name__.removesuffix('_llm')}_loss")
    other = replace(batch, logprobs=batch.logprobs - 3)
    assert torch.equal(loss(agent, batch, args)[0], loss(agent, other, args)[0])


def check_joint_optimisation(script):
    (agent,), _ = agents_of(script)
    (optimizer,) = agent.optimizers
    groups = [{id(x) for x in group["params"]} for group in optimizer.param_groups]
    for name, group in zip((agent.actor, agent.critic), groups):
        assert {id(x) for x in adapters.parameters(agent.model, name)} <= group


def check_one_turn(script):
    args = script.resolve_args(script.Args(max_turns=1))
    (agent,), _ = agents_of(script)
    rollout = script.sample(agent, ["Say a number."] * 4, args, seeded())
    assert set(rollout.turn_of_token.flatten().tolist()) <= {0, -1}


TEMPLATE = [{"role": "user", "content": "Q: {question}\nA:"}]  # this and the next are AgileRL's example


def reward_fn(completion: str, answer: str, question: str) -> float:
    del question
    return float(answer.lower() in completion.lower())


def check_questions(script):
    task = load_task(SimpleNamespace(conversation_template=TEMPLATE, reward_fn=reward_fn), 1)
    assert task.formatters(ROWS[1]) == [{"role": "user", "content": "Q: 1 + 1?\nA:"}]
    assert task.reward_func(["It is 2.", "2"], items=ROWS[1:3]) == [1.0, 0.0]


class ToyMultiTurnEnv:
    def reset(self, seed=None):
        return "Start: What is 2+2?", {}

    def step(self, action):
        return "Done.", 1.0, True, False, {"correct": True}


def check_env_factory(script):
    flags = FLAGS["ppo"] | {"num_agents": 1, "max_turns": 4, "output_dir": "environment"}
    _, run = script.main(script.Args(**flags), None, *small_model(), env=lambda: ToyMultiTurnEnv())
    assert [row["reward_mean"] for row in run.rows] == [1.0] * 3


def check_actor_network(script):
    (agent,), _ = agents_of(script)
    name, weight = next(small_model()[0].named_parameters())
    own = agent.model.get_base_model().get_parameter(name)
    assert own is not weight and torch.equal(own, weight)


def check_max_steps(script):
    assert [row["global_step"] for row in run_of(script)[0].rows] == [4, 8]


def check_evaluation_interval(script):
    flags = FLAGS["ppo"] | {"train_size": 20, "evaluation_interval": 2, "eval_loop": 1, "num_agents": 1}
    args = script.Args(**(flags | {"max_turns": 1, "output_dir": "evaluated"}))
    _, run = script.main(args, None, *small_model(), env=ToyMultiTurnEnv)
    assert [row["fitness"] is not None for row in run.rows] == [True, True, False, True, True]


def check_model_name(script):
    with pytest.raises(UserError, match="^--model takes a model's folder .* and .*utils has no config.json"):
        script.resolve_args(script.Args(model=str(ROOT / "utils")))


def check_policy(script):
    (agent,), _ = agents_of(script)
    assert isinstance(agent.model, peft.PeftModel) and agent.actor in agent.model.peft_config


def check_load(script):
    learned = train("ppo", folder="loaded")[0]
    agents, args = load("loaded", script, "cpu", 1, *small_model())
    for agent, other in zip(agents, learned, strict=True):
        weights = adapters.parameters(agent.model, agent.actor)
        assert same_tensors(weights, adapters.parameters(other.model, other.actor))
    assert args.num_agents == 2


CHECKS = {  # of what is no flag, or of a flag's effect; of one script, or of all of its table
    (ippo_llm, r"IPPO's $J(\theta_i)$"): check_gae,
    (iac_llm, r"IAC's $J(\theta_i)$"): check_td_error,
    "agent_learning_rate": check_learning_rate,
    (maac_llm, "discount"): check_td_error,
    (magrpo_llm, "discount"): check_discount_of_trees,
    "Separate Critic": check_separate_critic,
    "Value Head": check_value_head,
    "use_separate_critic": check_separate_critic,
    "reward_processor": check_reward_processor,
    "formatters": check_formatters,
    "args": check_args,
    "train_dataset": check_train_dataset,
    "eval_dataset": check_eval_dataset,
    "metrics_callback": check_metrics_callback,
    "no importance sampling, no ratio clipping": check_no_ratio,
    "turn-level credit assignment": check_gae,
    "actor-critic optimization": check_joint_optimisation,
    "single-turn and multi-turn parity": check_one_turn,
    "reward_fn": check_questions,
    "conversation_template": check_questions,
    "env_factory": check_env_factory,
    "model_name": check_model_name,
    "actor_network": check_actor_network,
    "max_steps": check_max_steps,
    "evaluation_interval": check_evaluation_interval,
    "get_policy": check_policy,
    "load": check_load,
}


# --- Lines of the pages -----------------------------------------------------------------------------------------------


def test_a_line_of_the_page_copies_the_actor_to_the_critic(tokenizer):
    (line,) = re.findall(r"`(adapters\.copy_adapter\(.*?\))`", (ROOT / "docs/checkpoints.md").read_text())
    agent = make_team(tiny_base(), tokenizer)[1]
    change_adapters(agent.model)
    weights = [adapters.parameters(agent.model, name) for name in (agent.actor, agent.critic)]
    assert not same_tensors(*weights)
    exec(line, {"adapters": adapters, "agent": agent})
    assert same_tensors(*weights)


def test_a_line_of_the_page_begins_an_optimiser_anew():
    (line,) = re.findall(r"`(agent\.optimizers.*?clear\(\))`", PAGE)
    (agent,), args = agents_of(ppo_llm, num_agents=1, max_turns=1)
    args = ppo_llm.resolve_args(args)
    rollout = ppo_llm.sample(agent, ["Say a number."] * 4, args, seeded())
    steps = []
    for _ in range(2):
        ppo_llm.learn(agent, rollout, args, seeded())
        steps.append([float(state["step"]) for state in agent.optimizers[0].state.values()])
        exec(line, {"agent": agent})
    assert steps[0] == steps[1] and len(steps[0]) > 0
