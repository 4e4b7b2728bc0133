"""Every flag of ppo_llm does something: a table of flags, another value for each, and what then changes."""

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers import make_model, watch_passes
from torch import nn

import ppo_llm
from utils.tasks import number

SMALL = {  # two updates of two optimiser steps
    "train_size": 16,
    "rollout_buffer_size": 8,
    "batch_size": 4,
    "num_train_epochs": 1,
    "max_turns": 2,
    "max_output_tokens": 4,
    "evaluation_interval": 0,
    "lora_rank": 8,
    "lora_alpha": 16.0,
    "update_epochs": 1,
    "lr_actor": 2e-3,
}
PLAYS = {"respond"}
READS = {"compute_values", "compute_logprobs"}
LEARNS = {"ppo_loss", "value_loss"}
STAGE = "<a run>"  # these are made once, by `places`
LORA = "<a file of a LoRA configuration>"
MODEL = "<another model>"
DATA = "<a file of items>"
RUNS = {}  # that several tests look at


def train(folder, own_task=None, **flags):
    """What a short run learned and wrote, and how it read the base."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        seen = watch_passes(monkeypatch)
        seen.layers = Counter()  # times that the first layer was computed, by function
        seen.dtypes = set()  # of the logits, by function
        seen.compiled = []
        seen.responses = []  # of agent 0 in each update
        seen.held_out = []  # items of each evaluation
        load_models = ppo_llm.models.load_models
        play = ppo_llm.play

        def load_and_watch(*values):
            (base, *_) = loaded = load_models(*values)
            layer = base.base_model.layers[0]
            layer.register_forward_pre_hook(count_layer)
            base.lm_head.register_forward_hook(note_dtype)
            return loaded

        def count_layer(*_):
            backward = ["backward"] if torch.is_grad_enabled() else []  # without gradients: while agents are built
            seen.layers.update(seen.functions[-1:] or backward)

        def note_dtype(*values):
            seen.dtypes.update((name, values[-1].dtype) for name in seen.functions[-1:])

        def play_and_watch(agents, task, items, *others, greedy=False, **named):
            rollouts = play(agents, task, items, *others, greedy=greedy, **named)
            if greedy:
                seen.held_out.append(len(items))
            else:
                seen.responses.append(rollouts[0].responses)
            return rollouts

        monkeypatch.setattr(ppo_llm.models, "load_models", load_and_watch)
        monkeypatch.setattr(ppo_llm, "play", play_and_watch)
        monkeypatch.setattr(nn.Module, "compile", lambda self, **named: seen.compiled.append((self, named["mode"])))
        args = ppo_llm.Args(**{**SMALL, "output_dir": str(folder), **flags})
        seen.agents, seen.run = ppo_llm.main(args, own_task)
    seen.rows = seen.run.rows
    seen.folder = seen.run.folder
    return seen


@pytest.fixture(scope="module")
def places(tmp_path_factory, tokenizer):
    """What flags name by its place: a run whose policy is another than the base's, a model, a file of items."""
    folder = tmp_path_factory.mktemp("places")
    RUNS[STAGE] = train(folder / "run", lr_actor=0.05, cosine_lr_schedule=False)
    (folder / "items.jsonl").write_text("\n".join([json.dumps({"share": 0.5})] * 40))
    model = make_model(folder / "model", tokenizer)
    (folder / "lora.json").write_text(json.dumps({"r": 4, "use_dora": True}))
    files = {DATA: str(folder / "items.jsonl"), LORA: str(folder / "lora.json")}
    return {STAGE: str(folder / "run"), MODEL: model, **files}


@pytest.fixture(scope="module")
def baseline(tmp_path_factory, places):
    """A function of flags other than SMALL's: a run, made once."""

    def make(**flags):
        key = str(sorted(flags.items()))
        if key not in RUNS:
            RUNS[key] = train(tmp_path_factory.mktemp("before") / "run", **in_place(flags, places))
        return RUNS[key]

    return make


def in_place(flags, places):
    return {name: places[value] if value in [*places] else value for name, value in flags.items()}


# --- What a flag may change -------------------------------------------------------------------------------------------


def weights(seen, groups=(0, 1)):
    """What the optimisers hold: 0 the actors, 1 the critics with their heads."""
    return [x for agent in seen.agents for group in groups for x in agent.optimizers[0].param_groups[group]["params"]]


def same_weights(before, after, groups=(0, 1)):
    pairs = list(zip(weights(before, groups), weights(after, groups)))
    return all(one.shape == other.shape and torch.equal(one, other) for one, other in pairs)


def other_actors(before, after):
    return not same_weights(before, after, [0])


def other_critics(before, after):
    return not same_weights(before, after, [1])


def other_responses(before, after):
    """In the first update, when all have learned nothing yet."""
    return before.responses[0] != after.responses[0]


def same_first_responses(before, after):
    return not other_responses(before, after)


def same_but_for_rounding(before, after):
    pairs = zip(weights(before), weights(after))
    close = all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)
    return same_first_responses(before, after) and close


def same_first_losses(before, after):
    """But for rounding."""
    names = [f"agent_0/{name}" for name in ("policy_loss", "value_loss", "entropy", "grad_norm")]
    pairs = [(before.rows[0][name], after.rows[0][name]) for name in names]
    return before.run.samples[:2] == after.run.samples[:2] and all(a == pytest.approx(b, rel=1e-3) for a, b in pairs)


def updates(expected):
    return lambda before, after: len(before.rows) == 2 and len(after.rows) == expected


def becomes(attribute, expected):
    """Something of a run is this now, and was not before."""
    return lambda before, after: attribute(after) == expected != attribute(before)


def both(*checks):
    return lambda before, after: all(check(before, after) for check in checks)


def rates(name):
    """Learning rates of the actor and of the critic with its head."""
    return lambda seen: [group[name] for group in seen.agents[0].optimizers[0].param_groups]


def steps(seen):
    return {int(state["step"]) for state in seen.agents[0].optimizers[0].state.values()}


def most_rows(functions):
    """The most rows that the base read at once in these functions."""
    return lambda seen: max(each.rows for each in seen.passes if each.function in functions)


def functions_without_positions(seen):
    return {each.function for each in seen.passes if not each.has_positions}


def targets(seen):
    """The layers with an adapter, by name."""
    return {name.split(".lora_")[0].split(".")[-1] for name, _ in seen.base.named_parameters() if ".lora_A." in name}


def projection(seen):
    return seen.base.base_model.layers[0].self_attn.q_proj


def metric(name, update=0):
    return lambda seen: seen.rows[update].get(name)


def files(seen):
    return {path.name for path in seen.folder.rglob("*")}


def first_item(seen):
    return seen.run.samples[0]["item"]


def items(seen):
    """The items of the joint samples of the first update, as strings."""
    return [str(sample["item"]) for sample in seen.run.samples if sample["update"] == 1]


def layers_twice(before, after):
    """What is differentiated was computed once more, and nothing else."""
    again = sum(before.layers[function] for function in LEARNS)
    return again > 0 and after.layers == before.layers | Counter(backward=again)


NUMBER = {"task": "number", "evaluation_interval": 1, "eval_size": 5}
ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
TLDR = {"task": "tldr", "max_turns": 1}
STAGED = {"load_checkpoint": STAGE}
# flag: (another value, other flags of both runs, what has to change)
TABLE = {
    # the run
    "seed": (2, {}, other_responses),
    "env": ("grid", {}, becomes(lambda seen: "Walk from" in seen.run.samples[0]["prompts"][0][0], True)),
    "task": ("number", {}, becomes(lambda seen: [*first_item(seen)], ["share"])),
    "dataset": (DATA, NUMBER, becomes(first_item, {"share": 0.5})),
    "train_size": (24, {}, updates(3)),
    "max_prompt_length": (77, TLDR, updates(1)),  # eight of the 16 items have longer ones
    "long_prompts": ("truncate", TLDR | {"max_prompt_length": 77}, becomes(lambda seen: len(seen.rows), 2)),
    "eval_size": (2, NUMBER, becomes(lambda seen: seen.held_out[0], 2)),
    "evaluation_interval": (1, {"eval_loop": 2}, becomes(lambda seen: metric("fitness")(seen) is None, False)),
    "eval_loop": (3, NUMBER, becomes(lambda seen: seen.held_out[0], 3)),
    "num_train_epochs": (2, {}, updates(4)),
    "max_steps": (7, {}, updates(1)),
    "save_interval": (1, {"save_interval": 0}, becomes(lambda seen: "update_000001" in files(seen), True)),
    "keep_checkpoints": (1, {"save_interval": 1}, becomes(lambda seen: "update_000001" in files(seen), False)),
    "load_checkpoint": (STAGE, {"lr_actor": 0.0}, becomes(lambda seen: same_weights(RUNS[STAGE], seen), True)),
    "load_optimizer": (True, STAGED, both(other_actors, other_critics, becomes(steps, {8}))),
    "keep_reference": (True, STAGED, becomes(lambda seen: abs(metric("kl")(seen)) < 1e-5, False)),
    "fresh_critic": (True, STAGED, both(other_critics, same_first_responses)),
    "save_optimizer": (False, {}, becomes(lambda seen: (seen.folder / "agent_0/optimizer.json").exists(), False)),
    "save_base": (True, {}, becomes(lambda seen: "base" in files(seen), True)),
    # the agents
    "model": (MODEL, {}, becomes(lambda seen: seen.agents[0].value_head.in_features, 32)),
    "num_agents": (2, NUMBER, becomes(lambda seen: (len(seen.agents), "agent_1" in files(seen)), (2, True))),
    "lora_rank": (4, {}, becomes(lambda seen: weights(seen)[0].shape[0], 4)),
    "lora_alpha": (
        32.0,
        {},
        both(other_actors, other_critics, becomes(lambda seen: projection(seen).scaling["agent_0_actor"], 4.0)),
    ),
    "lora_dropout": (0.5, {}, both(other_actors, other_critics, same_first_responses)),
    "lora_target_modules": (("q_proj",), {}, becomes(targets, {"q_proj"})),
    "lora_config": (
        LORA,
        {"lora_rank": 16, "lora_alpha": 32.0},
        becomes(lambda seen: projection(seen).use_dora["agent_0_actor"], True),
    ),
    "merge_adapters": (
        False,
        {},
        both(becomes(lambda seen: seen.agents[0].model.mergeable, []), same_but_for_rounding),
    ),
    "use_separate_reference_adapter": (  # the base, from which the stage is far
        False,
        STAGED,
        both(
            becomes(lambda seen: "reference" in files(seen), False),
            becomes(lambda seen: abs(metric("kl")(seen)) < 1e-5, False),
        ),
    ),
    "reference_update_interval": (
        1,
        {"train_size": 8, "num_train_epochs": 2},
        becomes(lambda seen: abs(metric("kl", 1)(seen)) < 1e-5, True),
    ),
    "dtype": ("bfloat16", {}, becomes(lambda seen: seen.base.dtype, torch.bfloat16)),
    "mixed_precision": ("bf16", {}, becomes(lambda seen: ("ppo_loss", torch.bfloat16) in seen.dtypes, True)),
    "model_config": ({"rope_parameters": ROPE}, {}, other_actors),
    "attn_implementation": ("eager", {}, becomes(lambda seen: seen.base.config._attn_implementation, "eager")),
    "gradient_checkpointing": (True, {}, both(layers_twice, same_but_for_rounding)),
    "torch_compiler": (
        "default",
        {},
        becomes(
            lambda seen: [(module is seen.base.base_model, mode) for module, mode in seen.compiled], [(True, "default")]
        ),
    ),
    "calc_position_embeddings": (False, {}, becomes(functions_without_positions, PLAYS | READS | LEARNS)),
    # sampling
    "rollout_buffer_size": (4, {}, updates(4)),
    "num_generations": (4, {}, both(becomes(lambda seen: len(set(items(seen))), 1), updates(8))),
    "max_turns": (3, {}, becomes(lambda seen: "turn_3/reward_mean" in seen.rows[0], True)),
    "early_termination_threshold": (-1.0, NUMBER, becomes(metric("turns"), 1)),
    "max_output_tokens": (1, {}, becomes(metric("agent_0/response_length"), 1.0)),
    "min_output_tokens": (4, {}, becomes(metric("agent_0/response_length"), 4.0)),
    "max_model_len": (22, {}, both(becomes(metric("truncated"), 8.0), becomes(metric("turns"), 1.0))),
    "temperature": (0.5, {}, other_responses),
    "top_p": (0.3, {}, other_responses),
    "top_k": (2, {}, other_responses),
    "min_p": (0.5, {}, other_responses),
    "repetition_penalty": (5.0, {}, other_responses),
    "hf_generate_chunk_size": (3, {}, becomes(most_rows(PLAYS), 3)),
    # the algorithm
    "action_granularity": ("turn", {}, both(other_actors, other_critics)),
    "turn_value_reduction": ("final_value", {}, both(other_actors, other_critics)),
    "turn_level_clip": (True, {}, other_actors),
    "gamma": (0.5, {}, both(other_actors, other_critics)),
    "gae_lambda": (0.1, {}, both(other_actors, other_critics)),
    "adv_whitening": (False, {}, other_actors),
    "clip_coef": (1e-4, {}, both(other_actors, other_critics)),
    "beta": (10.0, {}, other_actors),
    "vf_coef": (5.0, {}, other_critics),
    "ent_coef": (1.0, {}, other_actors),
    "update_epochs": (2, {}, both(other_actors, other_critics, becomes(steps, {8}))),
    "batch_size": (8, {}, both(other_actors, becomes(steps, {2}), becomes(most_rows(LEARNS), 8))),
    "micro_batch_size_per_gpu": (2, {}, both(same_first_losses, becomes(most_rows(READS | LEARNS), 2))),
    # the optimiser
    "lr_actor": (1e-3, {}, both(other_actors, other_critics, becomes(rates("initial_lr"), [1e-3, 1e-3]))),
    "lr_critic": (1e-3, {}, both(other_critics, becomes(rates("initial_lr"), [2e-3, 1e-3]))),
    "cosine_lr_schedule": (False, {}, both(other_actors, other_critics, becomes(rates("lr"), [2e-3, 2e-3]))),
    "warmup_proportion": (0.5, {}, both(other_actors, other_critics)),
    "max_grad_norm": (1e-3, {}, both(other_actors, other_critics)),
}
ELSEWHERE = {  # and the test here, or the file, that changes them
    "output_dir": "test_a_flag_changes_what_happens",
    "resume": "test_resume.py",
    "fork": "test_fork.py",
    "pause_at": "test_pause.py",
    "reward_timeout": "test_reward_faults.py",
    "deterministic": "test_release.py",
    "overwrite": "test_starting_points.py",
    "merge_lora_configs": "test_adapter_files.py",
    "trust_remote_code": "test_code_of_a_model_is_run_only_with_the_flag",
    "static_cache": "test_cache.py",
    "shard": "test_ppo_processes.py",
    "use_vllm": "test_vllm.py",
    "vllm_config": "test_vllm.py",
    "sampler_correction": "test_sampler_correction.py",
    "track": "test_weights_and_biases_gets_what_the_flags_say",
    "wandb_project_name": "test_weights_and_biases_gets_what_the_flags_say",
    "wandb_entity": "test_weights_and_biases_gets_what_the_flags_say",
    "wandb_run_name": "test_weights_and_biases_gets_what_the_flags_say",
    "wandb_tags": "test_weights_and_biases_gets_what_the_flags_say",
}


def test_the_table_has_every_flag():
    names = [field.name for field in dataclasses.fields(ppo_llm.Args)]
    assert sorted(names) == sorted([*TABLE, *ELSEWHERE])
    files = Path(__file__).parent
    assert all(callable(globals().get(test)) or (files / test).is_file() for test in ELSEWHERE.values())


@pytest.mark.parametrize("flag", TABLE)
def test_a_flag_changes_what_happens(tmp_path, places, baseline, flag):
    value, base, changed = TABLE[flag]
    before = baseline(**base)
    assert getattr(ppo_llm.Args(**(SMALL | base)), flag) != value
    assert changed(before, train(tmp_path / "after", **in_place(base | {flag: value}, places)))


# --- Flags that depend on others --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, expected",
    [
        ({}, "token"),
        ({"turn_level_clip": True}, "turn"),
        ({"turn_value_reduction": "mean"}, "turn"),
        ({"task": "tldr", "action_granularity": "turn"}, "turn"),
    ],
    ids=str,
)
def test_an_action_is_a_token_unless_a_flag_of_turns_is_given(flags, expected):
    assert ppo_llm.resolve_args(ppo_llm.Args(**flags)).action_granularity == expected


@pytest.mark.parametrize(
    "flags, expected",
    [
        ({}, {"max_turns": 6, "max_output_tokens": 8, "train_size": 4800}),
        ({"task": "tldr"}, {"max_turns": 1, "max_output_tokens": 72, "train_size": None}),
        ({}, {"gae_lambda": 0.85}),
        ({"action_granularity": "turn"}, {"gae_lambda": 0.7}),
        ({"task": "tldr"}, {"gae_lambda": 0.95}),
        ({"gae_lambda": 0.3}, {"gae_lambda": 0.3}),
        ({"lr_actor": 0.5}, {"lr_critic": 0.5}),
        ({"lr_critic": 0.0}, {"lr_critic": 0.0}),
        ({}, {"max_model_len": 512}),
        ({"max_model_len": 100}, {"max_model_len": 100}),
        ({"max_model_len": 1000}, {"max_model_len": 512}),
    ],
    ids=str,
)
def test_a_flag_without_a_value_depends_on_others(flags, expected):
    args = ppo_llm.resolve_args(ppo_llm.Args(**flags))
    assert {name: getattr(args, name) for name in expected} == expected


def test_more_held_out_items_than_there_are_is_all_of_them(tmp_path, capsys):
    seen = train(tmp_path / "run", eval_loop=9, **NUMBER)
    assert set(seen.held_out) == {5}
    assert "--eval-loop 9: the task has 5 held-out items, and those are taken" in capsys.readouterr().out


def test_an_environment_has_as_many_held_out_episodes_as_there_are_to_be(tmp_path):
    assert set(train(tmp_path / "run", eval_loop=9, evaluation_interval=1, train_size=8).held_out) == {9}


# --- Flags of what surrounds the run ----------------------------------------------------------------------------------


@pytest.mark.parametrize("trust", [False, True])
def test_code_of_a_model_is_run_only_with_the_flag(tmp_path, monkeypatch, trust):
    trusted = set()
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    for name in names:
        auto_class = getattr(transformers, name)

        def from_pretrained(*values, name=name, original=auto_class.from_pretrained, **named):
            trusted.add((name, named.get("trust_remote_code")))
            return original(*values, **named)

        monkeypatch.setattr(auto_class, "from_pretrained", from_pretrained)
    train(tmp_path / "run", trust_remote_code=trust, train_size=8)
    assert trusted == {(name, trust) for name in names}


class Wandb:
    """A stand-in for the package, which keeps what it gets."""

    Table = dict

    def __init__(self):
        self.started = []
        self.logged = []
        self.finished = []

    def init(self, **named):
        self.started.append(named)
        return self

    id = "1"

    def log(self, row, step=None):
        self.logged.append(row)

    def finish(self, exit_code):
        self.finished.append(exit_code)


OF_A_RUN = {"project": "llm-teams", "entity": None, "name": "run", "tags": []}
WANDB_FLAGS = {"wandb_project_name": "p", "wandb_entity": "e", "wandb_run_name": "n", "wandb_tags": ("a", "b")}


@pytest.mark.parametrize(
    "flags, expected",
    [({}, OF_A_RUN), (WANDB_FLAGS, {"project": "p", "entity": "e", "name": "n", "tags": ["a", "b"]})],
    ids=["defaults", "flags"],
)
def test_weights_and_biases_gets_what_the_flags_say(tmp_path, monkeypatch, flags, expected):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    seen = train(tmp_path / "run", track=True, train_size=8, **flags)
    (started,) = wandb.started
    assert {name: started[name] for name in expected} == expected
    assert wandb.logged[0]["reward_mean"] == seen.rows[0]["reward_mean"] and wandb.finished == [0]
    table = wandb.logged[-1]["samples"]
    assert (table["columns"], len(table["data"])) == (["global_step", "item", "agent_0", "reward"], 2)


# --- A task from Python -----------------------------------------------------------------------------------------------


def number_task(**attributes):
    """The task `number` with some of its names replaced."""
    names = ("train_dataset", "eval_dataset", "formatters", "reward_func", "external_transition")
    return SimpleNamespace(**({name: getattr(number, name) for name in names} | attributes))


def other_items(before, after):
    return first_item(before) != first_item(after)


ATTRIBUTES = {
    "reward_func": (lambda *texts: [float(k) for k in range(len(texts[0]))], other_actors),
    "reward_processor": (lambda reward: reward**2, other_actors),
    "formatters": (lambda item: "Guess it.", other_responses),
    "train_dataset": (number.eval_dataset, other_items),
    "eval_dataset": (lambda size, seed: number.eval_dataset(2, 0), becomes(lambda seen: seen.held_out[0], 2)),
    "metrics_callback": (lambda rollouts: {"mine": 1}, becomes(metric("mine"), 1.0)),
    "external_transition": (lambda prompt: None, becomes(metric("turns"), 1.0)),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_of_the_task_changes_what_happens(tmp_path, baseline, name):
    other, changed = ATTRIBUTES[name]
    after = train(tmp_path / "after", number_task(**{name: other}), **NUMBER)
    assert changed(baseline(**NUMBER), after)
