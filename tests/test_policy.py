"""Policies: loaded by the flags or given, called in one way; what is refused, in one line."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_base
from teams import IDS, logits_of, make_args, make_team, shake
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaModel

import ippo_llm
import maac_llm
from benchmark import architectures
from utils import models
from utils.cli import UserError, parse
from utils.models import causal_lm, engine, loading, weights
from utils.models import policy as policies

ONES = torch.ones_like(IDS)


@pytest.fixture
def save(tmp_path, tokenizer):
    """A function that saves a random model with the embedded one's tokenizer: its folder."""

    def make(name="model", **config):
        folder = tmp_path / name
        tiny_base(**({"vocab_size": 768} | config)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return make


def load(**flags):
    return models.load(ippo_llm.Args(**({"num_agents": 1} | flags)))


def critic_of(folder, **config):
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaModel(LlamaConfig(**({"vocab_size": 768} | small | config))).save_pretrained(folder)
    return (str(folder),)


# --- Called -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{"lora_rank": 0}, {}], ids=["whole", "adapters"])
def test_gradient_checkpointing_computes_layers_again_and_changes_no_gradient(base, tokenizer, flags):
    found = []
    calls = []
    for checkpointing in (False, True):
        agent = shake(make_team(base, tokenizer, gradient_checkpointing=checkpointing, **flags))[0]
        calls.append([])
        agent.actor.base.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls[-1].append(1))
        out = agent.actor.read(IDS, ONES > 0)
        out.logits.square().sum().backward()
        with torch.no_grad():
            logits_of(agent.actor)
        agent.critic.read(IDS, ONES > 0).hidden_states.square().sum().backward()
        found.append([x.grad for policy in (agent.actor, agent.critic) for x in policy.parameters()])
    assert len(calls[0]) < len(calls[1])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_gradient_checkpointing_leaves_dropout_of_a_models_own_off(tokenizer):
    base = architectures.make_model("opt")
    assert base.config.dropout > 0
    for flags in ({"lora_rank": 0}, {}):
        actor = make_team(base, tokenizer, gradient_checkpointing=True, **flags)[0].actor
        assert torch.equal(logits_of(actor), logits_of(actor))


@pytest.mark.parametrize("flags", [{"lora_rank": 0}, {}], ids=["whole", "adapters"])
def test_mixed_precision_rounds_a_policy_as_it_rounds_the_next(base, tokenizer, flags):
    agent = shake(make_team(base, tokenizer, mixed_precision="bf16", **flags), 0.05)[0]
    with torch.no_grad():
        read = agent.actor.read(torch.nn.functional.pad(IDS, (0, 1)), torch.ones(2, 11) > 0)
        logits = read.logits.unflatten(0, (2, 10))
        assert logits.dtype == torch.bfloat16
        torch.testing.assert_close(agent.actor.next_token(IDS, ONES).logits, logits[:, -1].float(), atol=0.05, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_a_frozen_model_is_saved_as_it_is_while_it_samples_in_bfloat16(tied, tmp_path):
    model = tiny_base(tie_word_embeddings=tied)
    causal_lm.prepare(model, "the model", mixed_precision="bf16")
    before = {name: x.clone() for name, x in model.requires_grad_(False).state_dict().items()}
    with causal_lm.frozen_weights_cast(model):
        assert torch.bfloat16 in {x.dtype for x in model.parameters()}
        weights.save_model(model, tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert saved.keys() == before.keys() and all(torch.equal(saved[name], x) for name, x in before.items())
    assert {x.dtype for x in model.parameters()} == {torch.float32}


DORA = {"lora_config": '{"use_dora": true}'}


@pytest.mark.parametrize("flags", [{"lora_rank": 0}, {}, DORA], ids=["whole", "adapters", "DoRA"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba"])
def test_while_agents_sample_frozen_weights_are_cast_once_and_give_the_same_bits(tokenizer, name, flags):
    agents = shake(make_team(architectures.make_model(name), tokenizer, mixed_precision="bf16", **flags), 0.05)
    base = agents[0].actor.base
    before = dict(base.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        logits = [agent.actor.next_token(IDS, ONES).logits for agent in agents]
        with models.sampling(agents, make_args(**flags)):
            changed = {key for key, x in base.named_parameters(remove_duplicate=False) if x is not before[key]}
            for agent, right in zip(agents, logits, strict=True):
                assert torch.equal(agent.actor.next_token(IDS, ONES).logits, right)
    assert all(x is before[key] for key, x in base.named_parameters(remove_duplicate=False))
    assert bool(changed) == (flags != {"lora_rank": 0})
    assert all(not before[key].requires_grad and key.endswith("weight") for key in changed)


def test_what_is_saved_as_agents_sample_is_not_rounded(base, tokenizer, tmp_path):
    agents = shake(make_team(base, tokenizer, mixed_precision="bf16", merge_adapters=False))
    for agent in agents:
        for parameter in agent.reference.parameters():
            parameter.requires_grad_(False)
    with torch.no_grad(), models.sampling(agents, make_args(merge_adapters=False)):
        weights.save_agents(tmp_path / "sampling", agents, checkpoint=True)
    weights.save_agents(tmp_path / "after", agents, checkpoint=True)
    files = [*(tmp_path / "after").rglob("*.safetensors")]
    assert len(files) > 6
    for file in files:
        assert file.read_bytes() == (tmp_path / "sampling" / file.relative_to(tmp_path / "after")).read_bytes()


@pytest.mark.parametrize("parts, foreach", [(0, None), (1, False), (2, None)])
def test_parts_and_whole_weights_take_steps_one_by_one(monkeypatch, parts, foreach):
    class Part(torch.nn.Parameter):
        pass

    monkeypatch.setattr(policies, "DTensor", Part)
    own = [Part(torch.ones(2)) if k < parts else torch.nn.Parameter(torch.ones(2)) for k in range(2)]
    optimizer = policies.adamw([SimpleNamespace(parameters=lambda: own), None], 1e-3, ippo_llm.Args())
    assert optimizer.defaults["foreach"] is foreach


def test_where_nothing_is_sampled_there_is_nothing_with_a_gradient(base, tokenizer):
    actor = make_team(base, tokenizer)[0].actor
    out = actor.read(IDS, ONES > 1)
    assert out.logits.shape == (0, 48) and out.hidden_states.shape == (0, 32)
    out.logits.sum().backward()
    assert all(not x.grad.any() for x in actor.parameters() if x.grad is not None)


def test_positions_are_counted_from_the_first_token_or_from_padding(base, tokenizer):
    ids = torch.nn.functional.pad(IDS[:1], (4, 0), value=5)
    mask = torch.nn.functional.pad(ONES[:1], (4, 0))
    seen = []
    for flag in (True, False):
        actor = make_team(base, tokenizer, lora_rank=0, calc_position_embeddings=flag)[0].actor
        actor.model.model.register_forward_pre_hook(lambda *a: seen.append(a[2].get("position_ids")), with_kwargs=True)
        with torch.no_grad():
            logits = actor.next_token(ids, mask).logits
            torch.testing.assert_close(logits, actor.model(IDS[:1]).logits[:, -1], atol=1e-5, rtol=0)  # rotary
    assert seen[0].tolist() == [[0, 0, 0, 0, *range(10)]] and seen[2] is None


def test_a_policy_takes_over_the_weights_of_another(base, tokenizer):
    for flags in ({"lora_rank": 0}, {}):
        agent = shake(make_team(base, tokenizer, **flags))[0]
        assert not torch.equal(logits_of(agent.reference), logits_of(agent.actor))
        with torch.no_grad():
            logits_of(agent.actor)
        agent.reference.copy_from(agent.actor)
        assert torch.equal(logits_of(agent.reference), logits_of(agent.actor))
        assert not any(x.requires_grad for x in agent.reference.parameters())


# --- Loaded -----------------------------------------------------------------------------------------------------------


def test_agents_of_one_model_share_it_frozen_and_copies_are_their_own(save):
    folder = save()
    initials = load(model=(folder,), num_agents=2)
    assert initials[0].policy is initials[1].policy
    assert not initials[0].policy.parameters() and not initials[0].policy.model.training
    copies = [initial.trainable_copy("actor") for initial in initials]
    critic = initials[0].trainable_critic("critic")
    assert len({x.data_ptr() for policy in (initials[0].policy, *copies) for x in policy.model.parameters()}) == 3 * 21
    assert type(critic.model) is LlamaModel and not critic.model.training
    assert initials[0].longest_prompt == 2048 - 72


def test_a_model_that_is_given_is_copied(base, tokenizer):
    before = {name: (x, x.clone()) for name, x in base.state_dict().items()}
    for flags in ({"lora_rank": 0}, {}):
        shake(make_team(base, tokenizer, **flags))
    assert {*base.state_dict()} == {*before} and not hasattr(base, "mixed_precision")
    assert all(torch.equal(x, before[name][1]) for name, x in base.state_dict().items())


def test_a_tokenizer_without_padding_pads_with_its_end_in_a_copy(base, tokenizer):
    without = copy.deepcopy(tokenizer)
    without.pad_token = None
    agents = make_team(base, without)
    assert without.pad_token is None and agents[0].tokenizer.pad_token == tokenizer.eos_token


# --- Settings, and data types -----------------------------------------------------------------------------------------

ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
BAD = {
    "colour=1": "--model-config takes what the configuration of .* has, or revision, .*, got colour",
    "dtype=bfloat16": "--model-config dtype: it is a flag of its own, --dtype",
    "hidden_act=5": r"--model-config hidden_act=5: .*expected str, got int \(value: 5\)",
    "hidden_act": "Error parsing --model-config: it takes KEY=VALUE, got hidden_act",
    "hidden_size=64": "--model .*model can't be loaded: .*",
}


def test_models_and_critics_have_the_settings(save, tmp_path):
    critic = critic_of(tmp_path / "critic", max_position_embeddings=4096)
    settings = {"model_config": {"rope_parameters": ROPE}, "critic_model_config": {"rope_parameters": ROPE}}
    (initial,) = load(model=(save(),), use_separate_critic=True, critic_model_name_or_path=critic, **settings)
    assert initial.trainable_copy("actor").config.rope_parameters == ROPE
    assert initial.trainable_critic("critic").config.rope_parameters == ROPE
    command = ["--model-config", f"rope_parameters={json.dumps(ROPE)}", "use_cache=false"]
    assert parse(ippo_llm.Args, command).model_config == {"rope_parameters": ROPE, "use_cache": False}


@pytest.mark.parametrize("setting", BAD)
def test_a_bad_setting_is_one_line(save, setting):
    with pytest.raises(UserError, match=BAD[setting]) as error:
        args = parse(ippo_llm.Args, ["--num-agents", "1", "--model", save(), "--model-config", setting])
        models.load(args)[0].policy
    assert "\n" not in str(error.value)


def test_settings_that_have_no_effect_are_refused(base, tokenizer):
    with pytest.raises(UserError, match="--model-config has no effect on a model that is loaded"):
        make_team(base, tokenizer, model_config={"use_cache": True})
    with pytest.raises(UserError, match="^model= is of no folder or hub name, .* give tokenizer= too$"):
        models.load(ippo_llm.Args(num_agents=1), base)


def test_a_loaded_model_reads_with_the_tokenizer_of_its_folder(tmp_path, tokenizer):
    own = tokenizer.train_new_from_iterator(["Say a number. 1 2 3 4 5 6 7 8 9"] * 9, vocab_size=97)
    own.save_pretrained(tmp_path)
    tiny_base(vocab_size=len(own)).save_pretrained(tmp_path)
    (initial,) = models.load(ippo_llm.Args(num_agents=1), AutoModelForCausalLM.from_pretrained(tmp_path))
    assert initial.tokenizer.get_vocab() == own.get_vocab() and initial.policy.name == str(tmp_path)


@pytest.mark.parametrize("flags", [{"lora_rank": 0}, {}], ids=["whole", "adapters"])
def test_data_types(tokenizer, save, flags):
    """--dtype is of the weights, but adapters are float32; --mixed-precision changes no weight."""
    flags = {"num_agents": 1, "model": (save(),), "lora_rank": 4, "use_separate_critic": True} | flags
    for more, base_type in (({"dtype": "bfloat16"}, torch.bfloat16), ({"mixed_precision": "bf16"}, torch.float32)):
        args = ippo_llm.Args(**flags, **more)
        (initial,) = models.load(args)
        agent = ippo_llm.Agent(0, initial, 1, args)
        learning_type = base_type if args.lora_rank == 0 else torch.float32
        for policy in (agent.actor, agent.critic):
            assert {x.dtype for x in policy.parameters()} == {learning_type}
            out = policy.read(IDS, ONES > 0)
            (out.hidden_states if out.logits is None else out.logits).square().sum().backward()
            assert policy.base.dtype == base_type and all(
                x.grad.isfinite().all() for x in policy.parameters() if x.grad is not None
            )
        before = [x.clone() for x in agent.actor.parameters()]
        agent.optimizers[0].step()
        assert not all(map(torch.equal, before, agent.actor.parameters()))


def test_a_quantized_base_learns_under_adapters(tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    for size, value in (("hidden_size", 128), ("intermediate_size", 128), ("head_dim", 32)):
        monkeypatch.setitem(architectures.SIZES, size, value)  # blocks of 64 are quantized together
    architectures.save_model("llama", tmp_path / "model")
    settings = {"quantization_config": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}}
    agent = architectures.train(str(tmp_path / "model"), str(tmp_path / "run"), 4, model_config=settings)
    projection = agent.actor.base.model.layers[0].self_attn.q_proj
    assert type(projection.base_layer).__name__ == "Linear4bit"
    assert architectures.weight_change(agent, None) > 1e-5


# --- Refused ----------------------------------------------------------------------------------------------------------


def test_models_that_are_not_there_are_one_line(tmp_path, save):
    cases = {
        "./nothing": "--model takes a model's folder or a hub name, and there is no folder ./nothing$",
        str(tmp_path): "--model takes a model's folder or a hub name, and .* has no config.json$",
        "a b": "--model takes a model's folder or a hub name, and there is no folder a b$",
    }
    for name, message in cases.items():
        with pytest.raises(UserError, match=message):
            load(model=(name,))
    with pytest.raises(UserError, match="^--model takes one name, or one for each of the 2 agents, got 3$"):
        load(model=("utils/tiny_lm",) * 3, num_agents=2)
    folder = save("damaged")
    (tmp_path / "damaged/model.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match="^--model .*damaged can't be loaded: ") as error:
        load(model=(folder,))[0].policy
    assert "\n" not in str(error.value)


def test_quantized_weights_are_taken_under_adapters_alone(save):
    folder = save()
    settings = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    with pytest.raises(UserError, match="quantized weights can't learn; they are taken under adapters"):
        load(model=(folder,), model_config=settings)
    load(model=(folder,), model_config=settings, lora_rank=4)
    with pytest.raises(UserError, match="^--shard takes a base that is not quantized"):
        load(model=(folder,), model_config=settings, lora_rank=4, shard=True)


def test_a_model_without_room_for_an_answer_is_one_line(save):
    folder = save(max_position_embeddings=40)
    with pytest.raises(UserError, match="^--max-new-tokens 72 after a prompt of 1 exceeds the positions of the mod"):
        load(model=(folder,))
    with pytest.raises(UserError, match="exceeds --max-model-len 30$"):
        load(model=(folder,), max_model_len=30, max_new_tokens=30)


def test_padding_that_the_model_does_not_know_is_one_line(tmp_path, tokenizer, save):
    more = copy.deepcopy(tokenizer)
    more.add_special_tokens({"pad_token": "<more>"})
    more.save_pretrained(save())
    with pytest.raises(UserError, match="^--model: the tokenizer's padding token, <more>, is number 768, and the m"):
        load(model=(str(tmp_path / "model"),))


@pytest.mark.parametrize(
    "config, message",
    [
        ({"max_position_embeddings": 64}, "has 64 positions, fewer than the actor reads: it takes --max-model-len 64"),
        ({"vocab_size": 700}, "knows 700 tokens, the actor's tokenizer has 768$"),
    ],
)
def test_a_critic_that_can_not_read_what_the_actor_does_is_one_line(tmp_path, config, message):
    critic = critic_of(tmp_path / "critic", **config)
    with pytest.raises(UserError, match=f"^--critic-model-name-or-path .*critic {message}"):
        load(use_separate_critic=True, critic_model_name_or_path=critic)


def test_a_critic_reads_a_token_that_only_its_actor_knows(tmp_path, save):
    critic = critic_of(tmp_path / "critic")
    flags = {"use_separate_critic": True, "critic_model_name_or_path": critic}
    (initial,) = load(model=(save(vocab_size=1024),), **flags)
    policy = initial.trainable_critic("agent_0_critic")
    ids = torch.tensor([[5, 1000, 7, 1]])
    last = torch.tensor([[5, 767, 7, 1]])
    mask = torch.tensor([[False, False, False, True]])
    assert torch.equal(policy.read(ids, mask).hidden_states, policy.read(last, mask).hidden_states)


@pytest.mark.parametrize("script", [ippo_llm, maac_llm])
def test_a_critics_tokenizer_that_can_not_be_read_is_one_line(script, tmp_path, tokenizer):
    folder = critic_of(tmp_path / "critic")[0]
    flags = {"num_agents": 1} | ({"use_separate_critic": True} if script is ippo_llm else {})
    args = script.Args(critic_model_name_or_path=(folder,), **flags)
    (initial,) = models.load(args)
    assert initial.trainable_critic("critic").tokenizer is initial.tokenizer
    tokenizer.save_pretrained(folder)
    file = tmp_path / "critic/tokenizer.json"
    file.write_text(file.read_text()[:1000])
    with pytest.raises(UserError, match="^--critic-model-name-or-path .*critic can't be loaded: Unterminated string"):
        models.load(args)
    file.unlink()
    with pytest.raises(UserError, match="^--critic-model-name-or-path .*critic has no tokenizer that can be read"):
        models.load(args)


def test_a_teams_critic_needs_a_token_to_pad_with(tmp_path, tokenizer):
    folder = critic_of(tmp_path / "critic")[0]
    bare = copy.deepcopy(tokenizer)
    bare.eos_token = bare.pad_token = None
    bare.save_pretrained(folder)
    with pytest.raises(UserError, match="^--critic-model-name-or-path: its tokenizer has no padding and no end token"):
        models.load(maac_llm.Args(num_agents=1, critic_model_name_or_path=(folder,)))


def test_a_model_that_counts_positions_otherwise_above_a_length_says_so(save, capsys):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    folder = save(vocab_size=768, rope_parameters=rope, max_position_embeddings=512)
    load(model=(folder,), max_model_len=128)
    assert "transcript above" not in capsys.readouterr().out
    load(model=(folder,))
    assert (
        "a transcript above 128 tokens is read in the same pass; --max-model-len 128 keeps" in capsys.readouterr().out
    )


def test_what_vllm_refuses_to_sample_with_is_one_line():
    def refuse(**_):
        raise ValueError("temperature must be at most 2")

    of_vllm = SimpleNamespace(vllm=SimpleNamespace(SamplingParams=refuse))
    with pytest.raises(UserError, match="^--use-vllm: temperature must be at most 2$"):
        engine.Engine.generate(of_vllm, [[1]], {}, 0)


@pytest.mark.parametrize("num_agents, rank", [(1, 0), (2, 4)])
def test_whenever_agents_sample_an_engine_is_given_their_weights(base, tokenizer, monkeypatch, num_agents, rank):
    """What vLLM makes of them is seen in test_vllm.py, which takes vLLM."""
    calls = []
    stub = object.__new__(engine.Engine)
    stub.owner, stub.adapters = None, []
    monkeypatch.setattr(engine, "find_engine", lambda *_: stub)
    monkeypatch.setattr(engine.Engine, "load_weights", lambda _, model: calls.append(model))
    monkeypatch.setattr(engine.Engine, "load_adapter", lambda _, i, save: calls.append(i))
    monkeypatch.setattr(engine.Engine, "check", lambda *_: None)
    monkeypatch.setattr(engine.Engine, "sample", lambda _, prompts, *rest: rest[-1])  # the numbers of the adapters
    agents = make_team(base, tokenizer, num_agents=num_agents, lora_rank=rank)
    args = make_args(lora_rank=rank, use_vllm=True)
    right = [0, 1] if rank else [agents[0].actor.model]
    for k in (1, 2):
        with models.sampling(agents, args):
            answers = [ippo_llm.generate(agent, [[5]] * 3, args, None) for agent in [*agents, *agents]]
        assert calls == right * k
        assert answers == [[i if rank else None] * 3 for i in range(num_agents)] * 2


def test_a_critic_with_another_tokenizer_is_one_line(tmp_path, tokenizer):
    critic = critic_of(tmp_path / "critic")
    path = AutoTokenizer.from_pretrained(tokenizer.name_or_path).save_pretrained(tmp_path / "critic")
    load(use_separate_critic=True, critic_model_name_or_path=critic)
    (json_file,) = [name for name in path if name.endswith("tokenizer.json")]
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    text = open(json_file).read()
    first, second = (f'"{word}": {tokenizer.get_vocab()[word]}' for word in words[-2:])
    swapped = f'"{words[-2]}": 767', f'"{words[-1]}": 766'
    assert first in text and second in text
    open(json_file, "w").write(text.replace(first, swapped[0]).replace(second, swapped[1]))
    with pytest.raises(UserError, match="critic has another tokenizer: it reads 2 of the actor's 768 tokens, such as"):
        load(use_separate_critic=True, critic_model_name_or_path=critic)


@pytest.mark.parametrize("flag", ["load_checkpoint", "lora_target_modules", "save_base"])
def test_flags_of_adapters_have_no_effect_without_them(flag):
    value = {"load_checkpoint": "x", "lora_target_modules": ("q_proj",), "save_base": True}[flag]
    with pytest.raises(UserError, match=f"^--{flag.replace('_', '-')} has no effect without --lora-rank"):
        load(**{flag: value})


def test_a_value_head_is_as_wide_as_the_states_that_it_reads():
    for width, sizes in ((6, {"hidden_size": 6}), (4, {"hidden_size": 6, "word_embed_proj_dim": 4})):  # the latter: OPT
        config = SimpleNamespace(**sizes)
        config.get_text_config = lambda config=config: config
        policy = SimpleNamespace(config=config, device="cpu")
        head = loading.ValueHead(policy, ippo_llm.Args())
        head.second = torch.nn.Linear(width, 2)  # of a script, which calls it itself
        assert head(torch.ones(3, width)).shape == (3,)


def test_the_critics_tokenizer_is_read_where_its_model_is(tmp_path, tokenizer):
    (critic,) = critic_of(tmp_path / "critic" / "sub")
    tokenizer.save_pretrained(critic)
    args = maac_llm.Args(critic_model_config={"subfolder": "sub"})
    assert loading.load_critic_tokenizer(None, str(tmp_path / "critic"), args).get_vocab() == tokenizer.get_vocab()
    with pytest.raises(UserError, match="^--model-config subfolder takes a text, got 1$"):
        load(model=(str(tmp_path / "critic"),), model_config={"subfolder": 1})
    with pytest.raises(UserError, match="^--model-config revision takes a text, got 1.0$"):
        load(model=(str(tmp_path / "critic"),), model_config={"revision": 1.0})


def test_a_model_without_gradient_checkpointing_is_one_line():
    with pytest.raises(UserError, match="^--gradient-checkpointing: SimpleNamespace does not support it$"):
        causal_lm.checkpoint_gradients(SimpleNamespace(supports_gradient_checkpointing=False))
