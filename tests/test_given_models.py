"""Models and tokenizers as users have them: what is learned is what is saved, and what a run leaves out is said."""

import copy
import datetime
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import ippo_llm
import ppo_llm
from utils import models
from utils.cli import UserError
from utils.models import encode

SMALL = {"task": "number", "train_size": 4, "eval_size": 4, "rollout_buffer_size": 4, "mini_batch_size": 4}
SMALL |= {"num_train_epochs": 1, "eval_interval": 0, "max_new_tokens": 3, "num_agents": 1, "num_turns": 1}


MODEL = Path(ippo_llm.__file__).parent / "utils/tiny_lm"


def build_model():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def train(tmp_path, model, tokenizer, script=ippo_llm, **flags):
    args = script.Args(**SMALL | {"output_dir": str(tmp_path / "run")} | flags)
    (agent, *_), _ = script.main(args, model=model, tokenizer=tokenizer)
    return agent


def with_adapters():
    """The embedded model with adapters that change what it says."""
    model = get_peft_model(build_model(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def test_adapters_of_a_model_are_merged_and_saved_with_it(tmp_path, tokenizer):
    model = with_adapters()
    ids = torch.tensor([tokenizer("Give a number.").input_ids])
    expected = model(ids).logits
    agent = train(tmp_path, model, tokenizer, actor_learning_rate=0.0)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run/agent_0", dtype=torch.float32)
    torch.testing.assert_close(agent.actor.model(ids).logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(saved(ids).logits, agent.actor.model(ids).logits, atol=0, rtol=0)
    assert model.peft_config  # the caller's own stays as it is


def test_a_folder_with_adapters_beside_its_weights_is_refused(tmp_path, tokenizer):
    with_adapters().save_pretrained(tmp_path / "both")
    build_model().save_pretrained(tmp_path / "both")
    tokenizer.save_pretrained(tmp_path / "both")
    both = (str(tmp_path / "both"),)
    for flags in ({"model": both}, {"use_separate_critic": True, "critic_model_name_or_path": both}):
        with pytest.raises(UserError, match="has adapters beside its weights: python -m utils.merge_adapter merges"):
            ippo_llm.main(ippo_llm.Args(**SMALL | {"output_dir": str(tmp_path / "run")} | flags))
    model = build_model()
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(UserError, match="^model= has adapters beside its weights"):
        train(tmp_path, model, tokenizer)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_learns_in_float32(tmp_path, tokenizer, dtype):
    agent = train(tmp_path, build_model().to(dtype), tokenizer, actor_learning_rate=1e-4)
    parameters = [*agent.actor.parameters(), *agent.reference.model.parameters()]
    assert {parameter.dtype for parameter in parameters} == {torch.float32}
    before, after = agent.reference.model.lm_head.weight, agent.actor.model.lm_head.weight
    change = (after - before).abs()
    assert 0 < change[change > 0].min() < 1e-4 * before.abs().max() * torch.finfo(dtype).eps


@pytest.mark.parametrize("where", ["generation_config", "config"])
def test_settings_that_are_not_saved_do_not_cost_the_weights(tmp_path, tokenizer, where):
    model = build_model()
    getattr(model, where).temperature = 0.5
    model.generation_config.do_sample = False
    agent = train(tmp_path, model, tokenizer)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run/agent_0")
    assert torch.equal(saved.lm_head.weight, agent.actor.model.lm_head.weight)
    assert saved.generation_config.eos_token_id == build_model().generation_config.eos_token_id
    args = ippo_llm.Args(**SMALL | {"resume": str(tmp_path / "run"), "num_train_epochs": 2})
    assert ippo_llm.main(args, model=model, tokenizer=tokenizer)[1].step == 2


def test_what_can_not_be_saved_is_said_before_a_run(tmp_path, tokenizer):
    model = build_model()
    model.config.note = object()
    with pytest.raises(UserError, match="^model= can't be saved: ") as error:
        train(tmp_path, model, tokenizer)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_a_token_without_an_embedding_is_one_line(tmp_path, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["zebra"])
    items = [{"prompt": "A zebra."}] * 4
    args = ippo_llm.Args(**SMALL | {"task": None, "output_dir": str(tmp_path / "run")})
    with pytest.raises(UserError, match="^an agent reads token 768, and its model knows 768 tokens: resize"):
        ippo_llm.main(args, None, build_model(), tokenizer, items, items)
    assert not (tmp_path / "run").exists()
    train(tmp_path, build_model(), tokenizer)  # no prompt has it


@pytest.mark.parametrize("script", [ippo_llm, ppo_llm], ids=lambda script: script.__name__)
def test_a_model_without_an_end_token_writes_full_answers_and_it_is_said(tmp_path, tokenizer, script, capsys):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = None
    model = build_model()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    train(tmp_path, model, tokenizer, script, min_output_tokens=2)
    assert "agent 0 has no end token: its answers all have --max-new-tokens 3 tokens" in capsys.readouterr().out


def test_words_among_special_tokens_are_said(tmp_path, tokenizer, capsys):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = "."
    train(tmp_path, build_model(), tokenizer)
    assert "has '.' among its special tokens, which texts of answers are without" in capsys.readouterr().out


@pytest.mark.parametrize("keep", [False, True])
def test_special_tokens_are_left_out_of_texts_or_kept_but_for_the_end(tokenizer, keep):
    args = ippo_llm.Args(**SMALL, keep_special_tokens=keep)
    (initial,) = models.load(args)
    agent = ippo_llm.Agent(0, initial, 1, args)
    user, end = tokenizer.convert_tokens_to_ids("<|user|>"), tokenizer.eos_token_id
    word = tokenizer("seven", add_special_tokens=False).input_ids
    texts = models.decode([[user, *word, end], word], agent, args)
    assert texts == (["<|user|>seven", "seven"] if keep else ["seven", "seven"])


def test_a_template_that_asks_for_the_date_gets_that_of_the_flag(tmp_path):
    folder = tmp_path / "dated"
    build_model().save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = "Today is {{ strftime_now('%d %b %Y') }}.\n" + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    for flags, said in (({}, "01 Jan 2026"), ({"chat_date": "2020-02-29"}, "29 Feb 2020")):
        args = ippo_llm.Args(**SMALL, model=(str(folder),), **flags)
        (initial,) = models.load(args)
        text = initial.tokenizer.decode(encode([{"role": "user", "content": "Hello."}], [], initial))
        assert text.startswith(f"Today is {said}.")
    assert datetime.date.today().strftime("%d %b %Y") != said
    with pytest.raises(UserError, match="^--chat-date: "):
        ippo_llm.Args(chat_date="tomorrow")


def test_masked_vocabulary_has_no_entropy_and_a_finite_gradient():
    """A model that masks a padded vocabulary with -inf, as some do: 0 log 0 is 0."""
    args = ippo_llm.Args(**SMALL, entropy_coef=0.5)
    (initial,) = models.load(args)
    agent = ippo_llm.Agent(0, initial, 1, args)
    read = agent.actor.read
    masked = torch.zeros(768)
    masked[700:] = -torch.inf

    def read_masked(*args, **options):
        out = read(*args, **options)
        out.logits = out.logits + masked
        return out

    agent.actor.read = read_masked
    transcript = ippo_llm.Transcript()
    transcript.extend([10, 11, 12])
    transcript.extend([13, 14], turn=1)
    rollout = ippo_llm.Rollout(*models.pad_right([transcript], agent))
    logprobs, entropy, _ = ippo_llm.policy_forward(agent.actor, rollout, torch.arange(1), args)
    logits = read(rollout.ids, rollout.attention_mask, before=rollout.turns > 0).logits[:, :700].double()
    expected = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(entropy[rollout.turns > 0].double(), expected, atol=1e-5, rtol=1e-5)
    (logprobs.sum() + entropy.sum()).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in agent.actor.parameters())
