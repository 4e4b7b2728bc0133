"""Vocabularies of a model and its tokenizer that differ: tokens without an embedding, logits of -inf, no end token."""

import copy
import functools
import math
from types import SimpleNamespace

import pytest
import torch
from short_runs import FLAGS, SCRIPTS, make_task, reward_length, small_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlamaModel

import ippo_llm
import ppo_llm
from utils import distributed, models
from utils.cli import UserError
from utils.models import causal_lm

every_script = pytest.mark.parametrize(
    "script", [pytest.param(name, marks=[pytest.mark.rest] * (name in ("iac", "maac"))) for name in SCRIPTS]
)


def train(script, model, tokenizer, folder, task=None, **flags):
    """Agents and Run of a short run."""
    args = SCRIPTS[script].Args(**FLAGS[script] | {"output_dir": str(folder / "run")} | flags)
    return SCRIPTS[script].main(args, task or make_task(reward_length), model, tokenizer)


def make_agents(model, tokenizer, script=ippo_llm, **flags):
    args = script.Args(**flags)
    return [script.Agent(i, initial, 1, args) for i, initial in enumerate(models.load(args, model, tokenizer))]


# --- Tokens without an embedding --------------------------------------------------------------------------------------

UNKNOWN = r"^a text has the token <new>, number 768, and the model knows 768 tokens: resize its embeddings \(resize_"


@pytest.fixture
def larger():
    """The tokenizer with one token more than the model has."""
    own = copy.deepcopy(small_model()[1])
    own.add_tokens(["<new>"])
    return own


@every_script
@pytest.mark.parametrize("flags", [{}, {"long_prompts": "truncate", "max_prompt_length": 20}], ids=str)
def test_a_token_that_the_model_does_not_know_is_found_before_training(script, flags, larger, tmp_path):
    task = make_task(reward_length)
    task.formatters = lambda item: "Say <new> now."
    with pytest.raises(UserError, match=UNKNOWN):
        train(script, small_model()[0], larger, tmp_path, task, **flags)
    task.formatters = lambda item: "Say it."  # a token that no text has does no harm
    _, run = train(script, small_model()[0], larger, tmp_path, task, overwrite=True, **flags)
    assert run.step == run.num_updates


def test_a_resized_model_knows_the_token(larger, tmp_path):
    model = copy.deepcopy(small_model()[0])
    model.resize_token_embeddings(len(larger))
    task = make_task(reward_length)
    task.formatters = lambda item: "Say <new> now."
    agents, run = train("ippo", model, larger, tmp_path, task)
    assert run.step == 3 and agents[0].actor.model.get_input_embeddings().weight.shape[0] == 769


def test_a_token_that_is_read_between_turns_is_one_line(larger):
    (agent, _) = make_agents(small_model()[0], larger)
    with pytest.raises(UserError, match=UNKNOWN):
        models.encode("Say <new> now.", [5, 6], agent)


def test_a_teams_critic_is_asked_for_its_tokens(larger, tmp_path):
    """It reads with the agents' tokenizer, having none."""
    config = copy.deepcopy(small_model()[0].config)
    config.vocab_size = 700
    LlamaModel(config).save_pretrained(tmp_path / "critic")
    message = r"and the model knows 700 tokens: resize its embeddings"
    with pytest.raises(UserError, match=message):
        train("maac", *small_model(), tmp_path, critic_model_name_or_path=str(tmp_path / "critic"))


def test_a_separate_critic_knows_what_its_actor_does(larger, tmp_path):
    model = small_model()[0]
    LlamaModel(model.config).save_pretrained(tmp_path / "critic")
    flags = {"critic_model_name_or_path": str(tmp_path / "critic"), "use_separate_critic": True}
    _, run = train("ippo", model, larger, tmp_path, **flags)
    assert run.step == 3


# --- No end token -----------------------------------------------------------------------------------------------------


@pytest.fixture
def endless():
    """A model and its tokenizer, without an end token."""
    model, own = copy.deepcopy(small_model())
    own.eos_token = own.chat_template = None
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model, own


@every_script
@pytest.mark.parametrize("flags", [{}, {"min_output_tokens": 2}], ids=str)
def test_without_an_end_token_answers_have_full_length_and_it_is_said_once(script, flags, endless, tmp_path, capsys):
    agents, run = train(script, *endless, tmp_path, **flags)
    said = (
        "a loaded model has no end token: each answer has --max-new-tokens, 3; eos_token of its tokenizer would be one"
    )
    assert capsys.readouterr().out.count(said) == 1
    assert run.step == run.num_updates and agents[0].end_ids.tolist() == []
    args = SCRIPTS[script].Args(**FLAGS[script] | flags)
    (answer,) = SCRIPTS[script].generate(agents[0], [[5, 6]], args, distributed.generator(1))
    assert len(answer) == 3


def test_what_is_saved_ends_its_answers_where_they_ended_in_the_run(tmp_path):
    """A configuration has another end token than the tokenizer, as one that is made without a thought of it has."""
    model, own = copy.deepcopy(small_model())
    model.config.eos_token_id = model.generation_config.eos_token_id = 50256  # it has no such token
    agents, _ = train("ippo", model, own, tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run/agent_0")
    assert saved.generation_config.eos_token_id == agents[0].end_ids.tolist() == [own.eos_token_id]


def test_an_end_token_that_the_model_does_not_know_is_none(capsys):
    model, own = copy.deepcopy(small_model())
    own.add_special_tokens({"eos_token": "<new end>"})
    own.chat_template = None  # which would end answers with a token that it knows
    model.generation_config.eos_token_id = None
    (agent, _) = make_agents(model, own)
    assert agent.end_ids.tolist() == [] and "has no end token" in capsys.readouterr().out


def test_the_end_token_of_a_teams_critic_may_be_number_0(tokenizer):
    own = copy.deepcopy(tokenizer)
    own.eos_token, own.pad_token = own.convert_ids_to_tokens([0, 7])
    agent = SimpleNamespace(tokenizer=own, actor=SimpleNamespace(device="cpu"))
    transcript = ippo_llm.Transcript()
    transcript.extend([9])
    transcript.extend([10], turn=1)
    transcript.answers.append("8")
    rollout = ippo_llm.Rollout(**models.pad_right([transcript], agent))
    critic = SimpleNamespace(critic=SimpleNamespace(tokenizer=own, device="cpu", config=small_model()[0].config))
    text = models.join_transcripts([agent], [rollout], critic, "{} reads {}", "{} writes {}")
    assert text.ids[text.marks > 0].tolist() == [0]


# --- Logits of -inf ---------------------------------------------------------------------------------------------------


class Masking(LlamaForCausalLM):
    """A model that masks its last ten tokens, as those whose vocabulary is padded."""

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits.index_fill(2, torch.arange(758, 768), -torch.inf)
        return out


@pytest.fixture
def masking():
    model, own = small_model()
    masked = Masking(copy.deepcopy(model.config))
    masked.load_state_dict(model.state_dict())
    return masked, own


def test_the_entropy_of_a_masked_vocabulary_and_its_gradient_are_those_of_the_rest():
    logits = torch.randn(5, 12)
    masked = torch.cat([logits, torch.full((5, 3), -torch.inf)], 1).requires_grad_()
    rest = logits.clone().requires_grad_()
    found, right = (models.Categorical(x).entropy() for x in (masked, rest))
    torch.testing.assert_close(found, right)
    found.sum().backward()
    right.sum().backward()
    torch.testing.assert_close(masked.grad[:, :12], rest.grad)
    assert not masked.grad[:, 12:].any()


def test_behind_a_cut_nothing_is_learned_of_a_padding_token_that_the_model_masks(masking):
    model, own = masking
    own.pad_token = own.convert_ids_to_tokens(760)
    args = ppo_llm.Args(mini_batch_size=2, micro_batch_size=2, update_epochs=1)
    (initial,) = models.load(args, model, own)
    agent = ppo_llm.Agent(0, initial, 1, args)
    transcripts = [ppo_llm.Transcript() for _ in range(2)]
    for k, transcript in enumerate(transcripts):
        transcript.extend([9, 10])
        transcript.extend([11, 12 + k], turn=1)
        transcript.rewards[-1] = float(k)
        transcript.answers.append("8")
    rollout = ppo_llm.Rollout(**models.pad_right(transcripts, agent, {0}))
    assert rollout.ids[0, -1] == 760
    metrics = ppo_llm.learn(agent, rollout, args, torch.Generator().manual_seed(1))
    assert all(math.isfinite(x) for x in metrics.values())


@every_script
def test_a_model_that_masks_tokens_learns_with_an_entropy_bonus(script, masking, tmp_path, capsys):
    has_bonus = "entropy_coef" in SCRIPTS[script].Args.__dataclass_fields__
    flags = {"entropy_coef": 0.1} if has_bonus else {}
    agents, run = train(script, *masking, tmp_path, **flags)
    entropies = [row[f"agent_{i}/entropy"] for row in run.rows for i in range(2)]
    assert run.step == run.num_updates and all(0 < entropy < 6.7 for entropy in entropies)  # log 758 is 6.63
    assert all(torch.isfinite(x).all() for x in agents[0].actor.parameters())
    assert "takes no padding" not in capsys.readouterr().out


def test_a_masked_vocabulary_is_not_taken_for_an_error_of_padding(masking):
    model = masking[0].eval()
    causal_lm.check_padding(model, "it")
    assert not getattr(model, "recomputes", False)
    x = torch.tensor([0.0, 1.0, 5.0, -torch.inf])
    assert causal_lm.mean_error(x, x) == 0
    assert causal_lm.mean_error(x, torch.tensor([0.0, 1.0, 5.0, 2.0])) == torch.inf
    assert not causal_lm.mean_error(torch.tensor([0.0, 1.0, torch.nan, -torch.inf]), x) <= 1
