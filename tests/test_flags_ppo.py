"""Every flag of ppo_llm does something: a table of flags, another value for each, and what then changes."""

import contextlib
import dataclasses
import json
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from test_flags import make_model
from torch import nn

import ppo_llm
import utils.models
import utils.run
from utils.cli import TaskError, UserError
from utils.tasks import number

# Two updates of two optimiser steps.
SMALL = {"train_size": 16, "rollout_buffer_size": 8, "batch_size": 4, "num_train_epochs": 1, "max_turns": 2}
SMALL |= {"max_output_tokens": 4, "evaluation_interval": 0, "eval_loop": 6, "eval_size": 5}
SMALL |= {"lora_rank": 8, "lora_alpha": 16.0, "update_epochs": 1, "action_granularity": "auto", "lr_actor": 2e-3}
STAGE, MODEL, DATA = "<a run>", "<another model>", "<a file of items>"  # made once, by `places`
SEEN = {}  # runs that several tests look at


@contextlib.contextmanager
def another_precision():
    """Within it an Accelerator may be of another precision than those before."""
    shared, before = AcceleratorState._shared_state, dict(AcceleratorState._shared_state)
    shared.clear()
    try:
        yield
    finally:
        shared.clear()
        shared.update(before)


def train(folder, given=None, **flags):
    """What a short run learned, said, wrote, and asked of the base."""
    seen = SimpleNamespace(reads=[], layers=Counter(), dtypes=set(), held_out=[], texts=[], compiled=[])
    phase = []

    def within(name):
        original = getattr(ppo_llm, name)

        def watched(*given, **known):
            phase.append(name)
            result = original(*given, **known)
            phase.pop()
            if name == "generate" and given[6:] == (True,):
                seen.held_out.append(len(given[2]))
            if name == "prepare":
                seen.texts.append(given[2].texts)
            return result

        return watched

    def read(module, given, known):
        rows = (given[0] if given else known["input_ids"]).shape[0]
        seen.reads.append((*phase, rows, known.get("position_ids") is not None))

    def load_model(*given):
        base = seen.base = utils.models.load_model(*given)
        base.base_model.register_forward_pre_hook(read, with_kwargs=True)
        base.base_model.layers[0].register_forward_pre_hook(lambda *_: seen.layers.update(phase))
        base.lm_head.register_forward_hook(lambda module, given, out: seen.dtypes.add((*phase, out.dtype)))
        return base

    args = ppo_llm.Args(**{**SMALL, "output_dir": str(folder), **flags})
    with pytest.MonkeyPatch.context() as patch, another_precision():
        for name in ("generate", "prepare", "learn"):
            patch.setattr(ppo_llm, name, within(name))
        patch.setattr(ppo_llm, "load_model", load_model)
        patch.setattr(nn.Module, "compile", lambda self, **known: seen.compiled.append((self, known)))  # takes minutes
        patch.setattr(utils.run, "draw_curves", lambda *_: None)
        seen.agents, run = ppo_llm.main(args, given)
    seen.run, seen.rows, seen.folder = run, run.rows, run.folder
    return seen


@pytest.fixture(scope="module")
def places(tmp_path_factory, tokenizer):
    """What flags name by its place: a run whose policy is another than the base's, a model, a file of items."""
    folder = tmp_path_factory.mktemp("places")
    SEEN[STAGE] = train(folder / "run", lr_actor=0.05, cosine_lr_schedule=False)
    (folder / "items.jsonl").write_text("\n".join([json.dumps({"share": 0.5})] * 40))
    made = {STAGE: folder / "run", MODEL: make_model(folder / "model", tokenizer), DATA: folder / "items.jsonl"}
    return {name: str(place) for name, place in made.items()}


@pytest.fixture
def baseline(tmp_path, places):
    """A run with other flags than SMALL's, made once."""

    def make(**flags):
        key = tuple(sorted(flags.items()))
        if key not in SEEN:
            SEEN[key] = train(tmp_path / f"before_{len(SEEN)}", **in_place(flags, places))
        return SEEN[key]

    return make


def in_place(flags, places):
    return {name: places.get(value, value) for name, value in flags.items()}


# --- What has to be seen ----------------------------------------------------------------------------------------------


def weights(seen, groups=(0, 1)):
    """What the optimisers hold: 0 the actors, 1 the critics with their heads."""
    return [x for agent in seen.agents for group in groups for x in agent.optimizers[0].param_groups[group]["params"]]


def same(before, after, groups=(0, 1)):
    pairs = list(zip(weights(before, groups), weights(after, groups)))
    return all(one.shape == other.shape and torch.equal(one, other) for one, other in pairs)


def learned(before, after):
    """Other actors came out."""
    return not same(before, after, [0])


def valued(before, after):
    """Other critics came out."""
    return not same(before, after, [1])


def said(before, after):
    """Other texts were sampled in the first update."""
    return before.texts[0] != after.texts[0]


def agreed(before, after):
    """The same texts, and the same weights but for rounding."""
    pairs = zip(weights(before), weights(after))
    return not said(before, after) and all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)


def alike(before, after):
    """The same texts, and in the first update the same losses and gradients but for rounding."""
    names = [f"agent_0/{name}" for name in ("policy_loss", "value_loss", "entropy", "grad_norm")]
    pairs = [(before.rows[0][name], after.rows[0][name]) for name in names]
    return before.run.samples[:2] == after.run.samples[:2] and all(a == pytest.approx(b, rel=1e-3) for a, b in pairs)


def updates(expected):
    return lambda before, after: len(before.rows) == 2 and len(after.rows) == expected


def of(attribute, expected):
    """Something of a run as it should be now, and was not."""
    return lambda before, after: attribute(after) == expected != attribute(before)


def both(*checks):
    return lambda before, after: all(check(before, after) for check in checks)


def rates(name):
    """Learning rates of the actor and of the critic with its head."""
    return lambda seen: [group[name] for group in seen.agents[0].optimizers[0].param_groups]


def steps(seen):
    return {int(state["step"]) for state in seen.agents[0].optimizers[0].state.values()}


def rows(*phases):
    """The most rows that the base read at once in a phase."""
    return lambda seen: max(rows for phase, rows, _ in seen.reads if phase in phases)


def numbered(seen):
    """Whether the base was told positions, in all phases."""
    return {(phase, given) for phase, _, given in seen.reads}


def adapted(seen):
    """The layers with an adapter, by name."""
    return {name.split(".lora_")[0].split(".")[-1] for name, _ in seen.base.named_parameters() if ".lora_A." in name}


def adapter(seen):
    return seen.base.base_model.layers[0].self_attn.q_proj


def metric(name, update=0):
    return lambda seen: seen.rows[update].get(name)


def files(seen):
    return {path.name for path in seen.folder.rglob("*")}


def first_item(seen):
    return seen.run.samples[0]["item"]


def ran_again(before, after):
    """In learning every layer was computed twice, elsewhere once."""
    once = before.layers
    return once["learn"] > 0 and after.layers == once | {"learn": 2 * once["learn"]}


PHASES = ("generate", "prepare", "learn")
NUMBER, STAGED = {"task": "number", "evaluation_interval": 1}, {"load_checkpoint": STAGE}
# flag: (another value, other flags of both runs, what has to be seen)
TABLE = {
    # the run
    "seed": (2, {}, said),
    "env": ("grid", {}, of(lambda seen: "Walk from" in seen.run.samples[0]["prompts"][0][0], True)),
    "task": ("number", {}, of(lambda seen: [*first_item(seen)], ["share"])),
    "dataset": (DATA, NUMBER, of(first_item, {"share": 0.5})),
    "train_size": (24, {}, updates(3)),
    "eval_size": (2, NUMBER, of(lambda seen: seen.held_out[0], 2)),
    "evaluation_interval": (1, {}, of(lambda seen: metric("fitness")(seen) is None, False)),
    "eval_loop": (3, NUMBER, of(lambda seen: seen.held_out[0], 3)),
    "num_train_epochs": (2, {}, updates(4)),
    "save_interval": (1, {}, of(lambda seen: "update_000001" in files(seen), True)),
    "keep_checkpoints": (1, {"save_interval": 1}, of(lambda seen: "update_000001" in files(seen), False)),
    "load_checkpoint": (STAGE, {"lr_actor": 0.0}, of(lambda seen: same(SEEN[STAGE], seen), True)),
    "load_optimizer": (True, STAGED, both(learned, valued, of(steps, {8}))),
    # the agents
    "model": (MODEL, {}, of(lambda seen: seen.agents[0].value_head.in_features, 32)),
    "num_agents": (2, NUMBER, of(lambda seen: (len(seen.agents), "agent_1" in files(seen)), (2, True))),
    "lora_rank": (4, {}, of(lambda seen: weights(seen)[0].shape[0], 4)),
    "lora_alpha": (32.0, {}, both(learned, valued, of(lambda seen: adapter(seen).scaling["agent_0_actor"], 4.0))),
    "lora_dropout": (0.5, {}, both(learned, valued, lambda before, after: not said(before, after))),
    "lora_target_modules": (("q_proj",), {}, of(adapted, {"q_proj"})),
    "use_separate_reference_adapter": (  # the base, which the stage has left
        False,
        STAGED,
        both(of(lambda seen: "reference" in files(seen), False), of(lambda seen: metric("kl")(seen) == 0, False)),
    ),
    "reference_update_interval": (1, {"train_size": 8, "num_train_epochs": 2}, of(metric("kl", 1), 0.0)),
    "dtype": ("bfloat16", {}, of(lambda seen: seen.base.dtype, torch.bfloat16)),
    "mixed_precision": ("bf16", {}, of(lambda seen: ("learn", torch.bfloat16) in seen.dtypes, True)),
    "attn_implementation": ("eager", {}, of(lambda seen: seen.base.config._attn_implementation, "eager")),
    "gradient_checkpointing": (True, {}, both(ran_again, agreed)),
    "torch_compiler": (
        "default",
        {},
        of(
            lambda seen: [(m is seen.base.base_model, known["mode"]) for m, known in seen.compiled], [(True, "default")]
        ),
    ),
    "calc_position_embeddings": (False, {}, of(numbered, {(phase, False) for phase in PHASES})),
    # sampling
    "rollout_buffer_size": (4, {}, updates(4)),
    "max_turns": (3, {}, of(lambda seen: "turn_3/reward_mean" in seen.rows[0], True)),
    "early_termination_threshold": (-1.0, NUMBER, of(metric("turns"), 1)),
    "max_output_tokens": (1, {}, of(metric("agent_0/response_length"), 1.0)),
    "min_output_tokens": (4, {}, of(metric("agent_0/response_length"), 4.0)),
    "max_model_len": (22, {}, both(of(metric("truncated"), 8.0), of(metric("turns"), 1.0))),
    "temperature": (0.5, {}, said),
    "top_p": (0.3, {}, said),
    "top_k": (2, {}, said),
    "min_p": (0.5, {}, said),
    "repetition_penalty": (5.0, {}, said),
    "hf_generate_chunk_size": (3, {}, of(rows("generate"), 3)),
    # the algorithm
    "action_granularity": ("token", {}, both(learned, valued)),
    "turn_value_reduction": ("final_value", {}, both(learned, valued)),
    "turn_level_clip": (True, {}, learned),
    "gamma": (0.5, {}, both(learned, valued)),
    "gae_lambda": (0.1, {}, both(learned, valued)),
    "adv_whitening": (False, {}, learned),
    "clip_coef": (1e-4, {}, both(learned, valued)),
    "beta": (10.0, {}, learned),
    "vf_coef": (5.0, {}, valued),
    "ent_coef": (1.0, {}, learned),
    "update_epochs": (2, {}, both(learned, valued, of(steps, {8}))),
    "batch_size": (8, {}, both(learned, of(steps, {2}), of(rows("learn"), 8))),
    "micro_batch_size_per_gpu": (2, {}, both(alike, of(rows("prepare", "learn"), 2))),
    # the optimiser
    "lr_actor": (1e-3, {}, both(learned, valued, of(rates("initial_lr"), [1e-3, 1e-3]))),
    "lr_critic": (1e-3, {}, both(valued, of(rates("initial_lr"), [2e-3, 1e-3]))),
    "cosine_lr_schedule": (False, {}, both(learned, valued, of(rates("lr"), [2e-3, 2e-3]))),
    "warmup_proportion": (0.5, {}, both(learned, valued)),
    "max_grad_norm": (1e-3, {}, both(learned, valued)),
}
ELSEWHERE = {  # and the test here that changes them
    "output_dir": "test_a_flag_changes_what_happens",
    "resume": "test_a_run_goes_on_from_its_checkpoint",
    "reward_timeout": "test_a_reward_function_that_takes_too_long_is_ended",
    "deterministic": "test_torch_takes_deterministic_algorithms_if_told",
    "overwrite": "test_an_earlier_run_is_kept_unless_told",
    "merge_lora_configs": "test_another_lora_configuration_is_merged_if_told",
    "trust_remote_code": "test_code_of_a_model_is_run_only_if_told",
    "track": "test_weights_and_biases_is_told_what_the_flags_say",
    "wandb_project_name": "test_weights_and_biases_is_told_what_the_flags_say",
    "wandb_entity": "test_weights_and_biases_is_told_what_the_flags_say",
    "wandb_run_name": "test_weights_and_biases_is_told_what_the_flags_say",
    "wandb_tags": "test_weights_and_biases_is_told_what_the_flags_say",
}


def test_the_table_has_every_flag():
    flags = [field.name for field in dataclasses.fields(ppo_llm.Args)]
    assert sorted(flags) == sorted([*TABLE, *ELSEWHERE])
    assert all(callable(globals()[test]) for test in ELSEWHERE.values())


def test_the_same_flags_change_nothing(baseline, tmp_path):
    """So that what changes does so for the flag."""
    before, after = baseline(), train(tmp_path / "after")
    assert same(before, after) and before.texts == after.texts and before.layers == after.layers
    assert before.reads == after.reads and before.run.samples == after.run.samples
    assert numbered(before) == {(phase, True) for phase in PHASES} and steps(before) == {4}


@pytest.mark.parametrize("flag", TABLE)
def test_a_flag_changes_what_happens(tmp_path, places, baseline, flag):
    value, base, changed = TABLE[flag]
    before = baseline(**base)
    assert getattr(ppo_llm.Args(**(SMALL | base)), flag) != value
    assert changed(before, train(tmp_path / "after", **in_place(base | {flag: value}, places)))


def test_an_action_is_a_turn_if_there_may_be_several():
    cases = [({"max_turns": 1}, False), ({"max_turns": 2}, True), ({}, True), ({"task": "tldr"}, False)]
    for flags, expected in cases:
        assert ppo_llm.Args(action_granularity="auto", **flags).by_turns == expected
        assert ppo_llm.Args(action_granularity="turn", **flags).by_turns
        assert not ppo_llm.Args(action_granularity="token", **flags).by_turns


def test_the_value_of_a_turn_is_that_of_its_first_token_of_its_last_or_the_mean(baseline):
    seen = [baseline(), *(baseline(turn_value_reduction=name) for name in ("mean", "final_value"))]
    assert valued(*seen[:2]) and valued(*seen[1:]) and valued(seen[0], seen[2])
    assert same(seen[0], baseline(turn_value_reduction="first_value"))


def test_an_earlier_run_is_kept_unless_told(tmp_path):
    train(tmp_path / "run", train_size=8, save_interval=1)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="--output-dir takes a folder without a run in it"):
        train(tmp_path / "run", train_size=8)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    seen = train(tmp_path / "run", overwrite=True)
    assert len(seen.rows) == 2 and "update_000001" not in files(seen)


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    before = train(tmp_path / "run", cosine_lr_schedule=False).rows
    after = train(tmp_path / "run", resume=str(tmp_path / "run"), num_train_epochs=2, cosine_lr_schedule=False).rows
    whole = train(tmp_path / "whole", num_train_epochs=2, cosine_lr_schedule=False).rows
    rewards = [[f"{row['reward_mean']:.9g}" for row in rows] for rows in (before, after, whole)]
    assert len(rewards[0]) == 2 and rewards[1] == rewards[2] and rewards[1][:2] == rewards[0]


def test_a_reward_function_that_takes_too_long_is_ended(tmp_path):
    task = task_of(reward_func=lambda first: time.sleep(30))
    with pytest.raises(TaskError, match="TimeoutError: no answer within --reward-timeout, 0.2 s"):
        train(tmp_path / "run", task, reward_timeout=0.2)


@pytest.mark.parametrize("told", [True, False])
def test_torch_takes_deterministic_algorithms_if_told(tmp_path, told):
    found = []

    def reward_func(first):
        found.append(torch.are_deterministic_algorithms_enabled())
        return [0.0] * len(first)

    train(tmp_path / "run", task_of(reward_func=reward_func), deterministic=told)
    assert set(found) == {told} and not torch.are_deterministic_algorithms_enabled()


def test_another_lora_configuration_is_merged_if_told(tmp_path, places):
    other = {"load_checkpoint": places[STAGE], "lora_rank": 12, "train_size": 8, "lr_actor": 0.0}
    with pytest.raises(UserError, match="r 8 there, 12 here"):
        train(tmp_path / "run", **other)
    assert not (tmp_path / "run").exists()
    with pytest.warns(UserWarning, match="r 8 there, 12 here; now r 12"):
        seen = train(tmp_path / "run", merge_lora_configs=True, **other)
    assert weights(seen)[0].shape[0] == 12 and metric("kl")(seen) == 0
    assert torch.equal(weights(seen)[0][:8], weights(SEEN[STAGE])[0])


@pytest.mark.parametrize("trust", [False, True])
def test_code_of_a_model_is_run_only_if_told(tmp_path, monkeypatch, trust):
    asked = []
    for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"):

        def from_pretrained(*given, name=name, original=getattr(utils.models, name).from_pretrained, **known):
            asked.append((name, known.get("trust_remote_code")))
            return original(*given, **known)

        monkeypatch.setattr(getattr(utils.models, name), "from_pretrained", from_pretrained)
    train(tmp_path / "run", trust_remote_code=trust, train_size=8)
    assert {*asked} == {(name, trust) for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")}


class Wandb:
    """A stand-in for the package, which remembers what it is told."""

    def __init__(self):
        self.started, self.logged, self.finished, self.Table = [], [], [], dict

    def init(self, **known):
        self.started.append(known)
        log, finish = (
            (lambda row, step=None: self.logged.append(row)),
            (lambda exit_code: self.finished.append(exit_code)),
        )
        return SimpleNamespace(id="1", log=log, finish=finish)


@pytest.mark.parametrize("named", [False, True])
def test_weights_and_biases_is_told_what_the_flags_say(tmp_path, monkeypatch, named):
    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    wandb, flags = sys.modules["wandb"], {}
    if named:
        flags = {"wandb_project_name": "p", "wandb_entity": "e", "wandb_run_name": "n", "wandb_tags": ("a", "b")}
    seen = train(tmp_path / "run", track=True, train_size=8, **flags)
    (told,) = wandb.started
    project, entity, name, tags = ("p", "e", "n", ["a", "b"]) if named else ("llm-teams", None, "run", [])
    assert (told["project"], told["entity"], told["name"], told["tags"]) == (project, entity, name, tags)
    assert wandb.logged[0]["reward_mean"] == seen.rows[0]["reward_mean"] and wandb.finished == [0]
    assert len(wandb.logged[-1]["samples"]["data"]) == 2


# --- Parts of a task, from Python -------------------------------------------------------------------------------------


def task_of(**parts):
    names = ("train_dataset", "eval_dataset", "formatters", "reward_func", "external_transition")
    return SimpleNamespace(**({name: getattr(number, name) for name in names} | parts))


def other_items(before, after):
    return first_item(before) != first_item(after)


OBJECTS = {  # of the parameters in Python, those that are no flags
    "reward_func": ({"reward_func": lambda *texts: [float(k) for k in range(len(texts[0]))]}, learned),
    "reward_processor": ({"reward_processor": lambda reward: reward**2}, learned),
    "formatters": ({"formatters": lambda item: "Guess it."}, said),
    "train_dataset": ({"train_dataset": number.eval_dataset}, other_items),
    "eval_dataset": ({"eval_dataset": lambda size, seed: number.eval_dataset(2, 0)}, of(lambda s: s.held_out[0], 2)),
    "metrics_callback": ({"metrics_callback": lambda rollouts: {"mine": 1}}, of(metric("mine"), 1.0)),
    "external_transition": ({"external_transition": lambda prompt: None}, of(metric("turns"), 1.0)),
}


@pytest.mark.parametrize("part", OBJECTS)
def test_a_part_of_the_task_changes_what_happens(tmp_path, baseline, part):
    other, changed = OBJECTS[part]
    assert changed(baseline(**NUMBER), train(tmp_path / "after", task_of(**other), **NUMBER))


def test_a_task_from_python_needs_no_flag(tmp_path):
    """As in the other scripts, where main(Args(), task) trains on that task."""
    seen = train(tmp_path / "run", task_of(), num_agents=2, train_size=8)
    assert len(seen.agents) == 2 and [*first_item(seen)] == ["share"]


def test_a_task_from_python_is_played_for_one_turn_unless_told(tmp_path):
    seen = train(tmp_path / "run", task_of(), max_turns=None, train_size=8)
    assert "turns" not in seen.rows[0]
