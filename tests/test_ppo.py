"""PPO on adapters against independent calculations: loops in float64 over single transcripts, without padding."""

import copy
import csv
import math

import peft
import pytest
import torch
from conftest import randomise_value_head
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ppo_llm
from ppo_llm import LoraAgent, Transcript, actor_loss, collate, critic_loss, estimate, generate, learn, prepare
from utils.adapters import add_adapters, lora_config
from utils.cli import TaskError
from utils.merge_adapter import Args as MergeArgs
from utils.merge_adapter import main as merge

EPS, IDS = 0.2, torch.arange(5, 45).reshape(2, 20)
REDUCTIONS = [("turn", "first_value"), ("turn", "mean"), ("turn", "final_value"), ("token", "first_value")]
ACTIONS = pytest.mark.parametrize("granularity, reduction", REDUCTIONS)
KIND = pytest.mark.parametrize("kind", ["game", "task"])
# Episodes of a game: tokens of prompt, response, observation, response ...; some truncated, after one or the other.
GAME = [[5, 3], [9, 4, 3, 2, 4, 6], [7, 2, 3, 5, 4], [4, 6], [6, 1, 2, 1, 2, 1], [11, 2, 5, 7], [3, 8], [8, 3, 2, 4]]
TRUNCATED = {("game", 2), ("game", 3), ("game", 7)}
# Turns of a task's episodes: episode, turn, tokens of prompt and response.
TASK = [(0, 0, [5, 3]), (0, 1, [9, 4]), (0, 2, [12, 1]), (1, 0, [4, 6]), (2, 0, [6, 2]), (2, 1, [7, 7])]
SHAPES = {"game": [(k, 0, lengths) for k, lengths in enumerate(GAME)]}
SHAPES |= {"task": [*TASK, (3, 0, [3, 1]), (3, 1, [8, 5])]}


def make_args(tmp_path=None, **flags):
    """Args of a run that takes seconds."""
    small = {"rollout_buffer_size": 8, "train_size": 16, "num_train_epochs": 1, "eval_size": 8, "eval_loop": 4}
    small |= {"max_turns": 3, "max_output_tokens": 5, "max_model_len": 200, "batch_size": 8, "lr_actor": 1e-2}
    small |= {"lora_rank": 8, "lora_alpha": 16.0, "update_epochs": 1, "action_granularity": "auto"}
    small |= {"output_dir": str(tmp_path / "run") if tmp_path else None}
    return ppo_llm.Args(**(small | flags))


def make_team(loaded_model, args, agents=1, scale=0.1):
    """(model, agents) with adapters and value heads that do something."""
    base, roles = copy.deepcopy(loaded_model), ("actor", "critic", "reference")
    torch.manual_seed(1)
    model = add_adapters(base, lora_config(args, base), [f"agent_{i}_{role}" for i in range(agents) for role in roles])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(scale * torch.randn(parameter.shape))
    return model, [randomise_value_head(LoraAgent(i, model, args, 10), i) for i in range(agents)]


def make_transcripts(kind):
    source = torch.Generator().manual_seed(3)

    def write(episode, turn, lengths):
        pieces = [torch.randint(5, 768, (n,), generator=source).tolist() for n in lengths]
        transcript = Transcript(episode, pieces[0], truncated=(kind, episode) in TRUNCATED)
        for k, piece in enumerate(pieces[1:]):
            transcript.write(piece, turn + k // 2 if k % 2 == 0 else -1)
        played = len(lengths) // 2
        transcript.prompts, transcript.texts = [""] * played, [""] * played
        transcript.rewards, transcript.processed = torch.randn(2, played, generator=source).tolist()
        return transcript

    return [write(*shape) for shape in SHAPES[kind]]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def turns_of(transcript):
    """The positions of the tokens of each turn."""
    turns = sorted({*transcript.turns} - {-1})
    return [[p for p, of in enumerate(transcript.turns) if of == turn] for turn in turns]


def at(transcript, position):
    """The column of a rollout that has the token at a position."""
    return position - turns_of(transcript)[0][0]


def policy(model, agent, transcript, temperature):
    """Of each position but the first: the token's log pi, and the entropy."""
    model.set_adapter(agent.actor)
    ids = torch.tensor(transcript.ids)
    log_pi = (model(ids[None]).logits[0, :-1].double() / temperature).log_softmax(-1)
    logprobs, entropies = log_pi[range(len(ids) - 1), ids[1:]], -(log_pi.exp() * log_pi).sum(-1)
    return [None, *logprobs], [None, *entropies]


def values_of(model, agent, transcript):
    """V before each position but the first, and, last, after all."""
    model.set_adapter(agent.critic)
    hidden = model(torch.tensor([transcript.ids]), output_hidden_states=True).hidden_states[-1]
    return [None, *agent.value_head(hidden)[0, :, 0].double()]


def actions_of(transcript, values, args):
    """Of each action the reward, the value, and the positions of its tokens."""
    for where, reward in zip(turns_of(transcript), transcript.processed):
        if args.by_turns:
            of_turn = [values[p] for p in where]
            known = {"first_value": of_turn[0], "mean": sum(of_turn) / len(of_turn), "final_value": of_turn[-1]}
            yield reward, known[args.turn_value_reduction], where
        else:
            yield from ((reward if p == where[-1] else 0.0, values[p], [p]) for p in where)


def targets_of(transcripts, values, args):
    """Of each action its row, the positions of its tokens, A and the critic's target: sums over what follows."""
    targets = []
    for episode in range(transcripts[-1].episode + 1):
        rows = [row for row, transcript in enumerate(transcripts) if transcript.episode == episode]
        chain = [(row, *action) for row in rows for action in actions_of(transcripts[row], values[row], args)]
        last = float(values[rows[-1]][-1]) if transcripts[rows[-1]].truncated else 0.0
        V = [float(value) for _, _, value, _ in chain] + [last]
        deltas = [reward + args.gamma * V[t + 1] - V[t] for t, (_, reward, _, _) in enumerate(chain)]
        for t, (row, _, _, where) in enumerate(chain):
            A = sum((args.gamma * args.gae_lambda) ** k * delta for k, delta in enumerate(deltas[t:]))
            targets.append((row, where, A, A + V[t]))
    return targets


def make_rollout(model, agent, kind, args, accelerator, noise=0.0):
    """Transcripts, and the rollout of them, prepared; with noise as if the policies were some steps apart."""
    transcripts = make_transcripts(kind)
    rollout = collate(transcripts, 0, args.num_turns, "cpu")
    prepare(model, agent, rollout, args, accelerator, seeded())
    estimate(rollout, args, accelerator)
    source = seeded(5)
    for name in ("logprobs", "reference_logprobs", "values"):
        x = getattr(rollout, name)
        rows = noise * torch.randn(x.shape, generator=source)
        if name == "values" and args.by_turns:  # one for all tokens of a turn
            rows = rows[:, :1].expand_as(x)
        setattr(rollout, name, x + rows * rollout.mask)
    return transcripts, rollout


def gradients(agent):
    return [p.grad.clone() for group in agent.optimizers[0].param_groups for p in group["params"] if p.grad is not None]


def assert_same_gradients(ours, theirs, atol=3e-5):
    assert len(ours) == len(theirs) and sum(g.abs().sum() for g in theirs) > 0.01
    for x, y in zip(ours, theirs):
        torch.testing.assert_close(x, y, atol=atol, rtol=1e-4)


# --- Advantages -------------------------------------------------------------------------------------------------------


@KIND
@ACTIONS
def test_advantages_and_targets_equal_sums(loaded_model, accelerator, kind, granularity, reduction):
    flags = {"action_granularity": granularity, "turn_value_reduction": reduction, "micro_batch_size_per_gpu": 3}
    args = make_args(gamma=0.9, gae_lambda=0.8, adv_whitening=False, **flags)
    model, (agent,) = make_team(loaded_model, args)
    transcripts, rollout = make_rollout(model, agent, kind, args, accelerator)
    with torch.no_grad():
        values = [values_of(model, agent, transcript) for transcript in transcripts]
    targets = targets_of(transcripts, values, args)
    expected = {name: torch.zeros_like(rollout.mask) for name in ("advantages", "returns", "values")}
    for row, where, A, target in targets:
        for p in where:
            for x, told in zip(expected.values(), (A, target, target - A)):
                x[row, at(transcripts[row], p)] = told
    for name, x in expected.items():
        torch.testing.assert_close(getattr(rollout, name), x, atol=2e-5, rtol=0)

    estimate(rollout, make_args(gamma=0.9, gae_lambda=0.8, **flags), accelerator)  # whitened, an action as one
    A = torch.tensor([A for _, _, A, _ in targets], dtype=torch.float64)
    white = (A - A.mean()) / A.std(correction=0)
    for (row, where, _, _), expected in zip(targets, white.tolist()):
        for p in where:
            assert rollout.advantages[row, at(transcripts[row], p)].item() == pytest.approx(expected, abs=5e-5)


# --- Losses -----------------------------------------------------------------------------------------------------------


@KIND
@ACTIONS
def test_the_value_loss_and_its_gradient_equal_a_loop(loaded_model, accelerator, kind, granularity, reduction):
    args = make_args(action_granularity=granularity, turn_value_reduction=reduction)
    model, (agent,) = make_team(loaded_model, args)
    transcripts, rollout = make_rollout(model, agent, kind, args, accelerator, noise=1.0)
    batch = rollout.select(torch.arange(8))
    model.set_adapter(agent.critic)
    loss = critic_loss(model, agent, batch, batch, args)
    loss.backward()
    ours = gradients(agent)

    agent.optimizers[0].zero_grad()
    total, count, clipped = 0.0, 0, 0
    for row, transcript in enumerate(transcripts):
        for _, value, where in actions_of(transcript, values_of(model, agent, transcript), args):
            column = at(transcript, where[-1])
            old, target = rollout.values[row, column].double(), rollout.returns[row, column].double()
            near = min(max(value, old - EPS), old + EPS)
            clipped += bool((near - target) ** 2 > (value - target) ** 2)
            total, count = total + max((value - target) ** 2, (near - target) ** 2), count + 1
    (total / count / 2).backward()
    assert 0 < clipped < count
    assert loss.item() == pytest.approx(total.item() / count / 2, abs=1e-5)
    assert_same_gradients(ours, gradients(agent))


@KIND
@pytest.mark.parametrize("granularity, level", [("turn", "turn"), ("turn", "token"), ("token", "token")])
def test_the_actors_loss_and_its_gradient_equal_a_loop(loaded_model, accelerator, kind, granularity, level):
    flags = {"action_granularity": granularity, "turn_level_clip": level == "turn"}
    args = make_args(beta=0.3, ent_coef=0.2, temperature=0.8, **flags)
    model, (agent,) = make_team(loaded_model, args)
    transcripts, rollout = make_rollout(model, agent, kind, args, accelerator, noise=0.2)
    batch = rollout.select(torch.arange(8))
    model.set_adapter(agent.actor)
    loss, parts = actor_loss(model, batch, batch, args)
    loss.backward()
    ours = gradients(agent)

    agent.optimizers[0].zero_grad()
    surrogate, k3, entropy, clipped, tokens, actions = 0.0, 0.0, 0.0, 0, 0, 0
    for row, transcript in enumerate(transcripts):
        logprobs, entropies = policy(model, agent, transcript, 0.8)
        for where in turns_of(transcript):
            ratios = []
            for p in where:
                column, log_pi = at(transcript, p), logprobs[p]
                ratios.append((log_pi - rollout.logprobs[row, column].double()).exp())
                d = rollout.reference_logprobs[row, column].double() - log_pi
                k3, entropy, tokens = k3 + d.exp() - d - 1, entropy + entropies[p], tokens + 1
            A = [rollout.advantages[row, at(transcript, p)].double() for p in where]
            if level == "turn":
                ratios, A = [math.prod(ratios)], A[-1:]
            for ratio, a in zip(ratios, A):
                surrogate = surrogate + min(a * ratio, a * min(max(ratio, 1 - EPS), 1 + EPS))
                clipped, actions = clipped + (abs(ratio.item() - 1) > EPS), actions + 1
    expected = -surrogate / actions + 0.3 * k3 / tokens - 0.2 * entropy / tokens
    expected.backward()
    assert 0 < clipped < actions
    told = {"policy_loss": -surrogate / actions, "k3": k3 / tokens, "entropy": entropy / tokens}
    told |= {"clip_fraction": torch.tensor(clipped / actions)}
    for name, value in told.items():
        assert parts[name].item() == pytest.approx(value.item(), rel=1e-5, abs=2e-5), name
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=2e-5)
    assert_same_gradients(ours, gradients(agent))


# --- Learning ---------------------------------------------------------------------------------------------------------


MEMORY = {"lora_dropout": 0.3, "gradient_checkpointing": True, "micro_batch_size_per_gpu": 2}
FIRST = [(0.0, {}), (0.0, {"lora_dropout": 0.3}), (0.0, {"gradient_checkpointing": True})]
FIRST += [(1e-2, {"micro_batch_size_per_gpu": 2}), (1e-2, MEMORY)]


@pytest.mark.parametrize("lr, flags", FIRST, ids=str)
def test_the_first_ratio_is_one_to_the_bit(loaded_model, accelerator, monkeypatch, lr, flags):
    args = make_args(batch_size=4, update_epochs=2, lr_actor=lr, **flags)
    model, (agent,) = make_team(loaded_model, args)
    if args.gradient_checkpointing:
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    seen, chosen = [], ppo_llm.chosen
    _, rollout = make_rollout(model, agent, "game", args, accelerator)

    def spy(log_pi, batch):
        logprobs = chosen(log_pi, batch)
        seen.append((logprobs - batch.logprobs).abs().max().item())
        return logprobs

    monkeypatch.setattr(ppo_llm, "chosen", spy)
    learn(model, agent, rollout, args, accelerator, seeded())
    of_step = 2 if args.micro_batch_size_per_gpu else 1  # micro-batches, of each of two steps in each of two epochs
    assert len(seen) == 4 * of_step
    assert not any(seen[:of_step] if lr else seen) and (lr == 0 or all(seen[of_step:]))


def test_dropout_is_on_while_learning_and_off_while_playing(loaded_model, tokenizer, accelerator):
    args = make_args(lora_dropout=0.3)
    model, (agent,) = make_team(loaded_model, args)
    transcripts, rollout = make_rollout(model, agent, "game", args, accelerator)
    with torch.no_grad():
        dense = policy(model, agent, transcripts[0], 1.0)[0][5]
    assert abs(rollout.logprobs[0, 0] - dense) > 1e-3
    generate(model, [agent.actor], [transcripts[0].ids], args, tokenizer, seeded())
    assert not any(module.training for module in model.modules())


@KIND
@pytest.mark.parametrize("flags", [{}, {"action_granularity": "token"}, {"turn_level_clip": True}], ids=str)
def test_micro_batches_add_up_to_the_gradient_of_their_step(loaded_model, accelerator, monkeypatch, kind, flags):
    clip, steps = ppo_llm.clip_gradients, []

    def spy(optimizer, *rest):
        steps.append([p.grad.clone() for group in optimizer.param_groups for p in group["params"]])
        return clip(optimizer, *rest)

    monkeypatch.setattr(ppo_llm, "clip_gradients", spy)
    metrics = []
    for size in (2, None):
        args = make_args(micro_batch_size_per_gpu=size, beta=0.3, ent_coef=0.1, max_grad_norm=1e9, **flags)
        model, (agent,) = make_team(loaded_model, args)
        _, rollout = make_rollout(model, agent, kind, args, accelerator, noise=0.2)
        assert [len(rows) for rows in rollout.steps[0]] == ([2] * 4 if size else [8])
        metrics.append(learn(model, agent, rollout, args, accelerator, seeded()))
    assert len(steps) == 2
    assert_same_gradients(*steps, atol=1e-5)
    for name in metrics[0]:
        torch.testing.assert_close(metrics[0][name], metrics[1][name], atol=1e-5, rtol=1e-4, msg=name)


def test_an_update_changes_the_agents_actor_critic_and_head_and_nothing_else(loaded_model, accelerator):
    args = make_args(batch_size=4, lora_dropout=0.1)
    model, agents = make_team(loaded_model, args, agents=2)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    heads = [copy.deepcopy(agent.value_head.state_dict()) for agent in agents]
    _, rollout = make_rollout(model, agents[0], "game", args, accelerator)
    learn(model, agents[0], rollout, args, accelerator, seeded())
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(before[name], parameter)}
    assert changed == {name for name in before if ".agent_0_actor." in name or ".agent_0_critic." in name}
    for agent, head, learned in zip(agents, heads, (True, False)):
        assert all(torch.equal(head[name], x) != learned for name, x in agent.value_head.state_dict().items())
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(IDS).logits, loaded_model(IDS).logits)


# --- Transcripts ------------------------------------------------------------------------------------------------------


class Scripted:
    """Six games, by seed; `told` is what they say after each turn. A digit is a token."""

    told = {1: "again", 2: "7" * 24, 3: "7" * 40, 4: "cut short", 5: "7" * 23}

    def reset(self, seed):
        self.seed, self.turn = seed, 0
        return f"game {seed}", {}

    def step(self, answer):
        self.turn += 1
        return self.told.get(self.seed, "over"), float(self.turn), self.seed == 0, self.seed == 4, {}


@pytest.mark.parametrize("template", ["own", "none", "another end"])
def test_a_transcript_is_what_was_read_and_written(loaded_model, tokenizer, clock, monkeypatch, template):
    tokenizer, end = copy.deepcopy(tokenizer), "<|system|>" if template == "another end" else "<|end|>"
    tokenizer.chat_template = None if template == "none" else tokenizer.chat_template.replace("<|end|>", end)
    args = make_args(max_model_len=40)
    model, agents = make_team(loaded_model, args)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(["<|end|>", end])
    END = tokenizer.convert_tokens_to_ids(end)
    first = [[510, END], [50, 51, 52, 53, 54], [60, END], [70, 71, END], [80, END], [85, END]]
    second, third = [[55, 56, 57, 58, 59], [86, 87, 88, 89, END]], [[90, 91, 92, 93, 94]]
    answers, asked = [first, second, third], []

    def scripted(model, adapters, prompts, *rest):
        assert adapters == ["agent_0_actor"] * len(prompts)
        asked.append(copy.deepcopy(prompts))
        return answers.pop(0)

    monkeypatch.setattr(ppo_llm, "generate", scripted)
    (team,), items, errors = ppo_llm.play_env(
        model, agents[0], Scripted, [{"seed": k} for k in range(6)], args, tokenizer, None, clock
    )
    assert answers == [] and errors == {} and items == [{"seed": k} for k in range(6)]

    def ids(text):
        return tokenizer(text, add_special_tokens=False).input_ids

    def observed(text, before=""):
        return ids(f"\n\n{text}\n\n" if template == "none" else f"{before}<|user|>{text}{end}<|assistant|>"), -1

    def prompt(text):
        return (ids(f"{text}\n\n"), -1) if template == "none" else observed(text)

    cut = observed("again", end)  # what was not sampled, but the script had to add, is no action
    expected = [
        [prompt("game 0"), (first[0], 0)],
        [prompt("game 1"), (first[1], 0), cut, (second[0], 1), cut, (third[0], 2)],
        [prompt("game 2"), (first[2], 0), observed("7" * 24)],  # there is room for 4 more tokens, not for 5
        [prompt("game 3"), (first[3], 0)],  # there is none for the observation
        [prompt("game 4"), (first[4], 0), observed("cut short")],
        [prompt("game 5"), (first[5], 0), observed("7" * 23), (second[1], 1)],
    ]
    for transcript, pieces in zip(team, expected, strict=True):
        assert transcript.ids == sum((piece for piece, _ in pieces), [])
        assert transcript.turns == [turn for piece, turn in pieces for _ in piece]
        of_turns = [tokenizer.decode(piece, skip_special_tokens=True) for piece, turn in pieces if turn >= 0]
        assert transcript.texts == of_turns
    assert (len(team[2].ids), len(team[5].ids)) == (36, 40)
    assert [transcript.truncated for transcript in team] == [False, False, True, True, True, True]
    assert [transcript.rewards for transcript in team] == [[1.0], [1.0, 2.0, 3.0], [1.0], [1.0], [1.0], [1.0, 2.0]]
    flat = [[piece for piece, _ in pieces] for pieces in expected]
    again = [sum(flat[1][:3], []), sum(flat[5][:3], [])]
    assert asked == [[pieces[0] for pieces in flat], again, [sum(flat[1][:5], [])]]


FRAGILE = """
class Env:
    def reset(self, seed):
        self.seed, self.turn = seed % 8, 0
        if self.seed == 0:
            raise RuntimeError("no start")
        return f"game {self.seed}", {}

    def step(self, answer):
        self.turn += 1
        if self.seed == 1 and self.turn == 2:
            raise KeyError("no step")
        return "lower " * (60 if self.seed > 5 else 1), float(len(answer)), False, False, {}
"""


def test_an_environment_that_fails_drops_its_own_episode(tmp_path, capsys):
    (tmp_path / "fragile.py").write_text(FRAGILE)
    args = make_args(tmp_path, env=str(tmp_path / "fragile.py"), train_size=8, max_model_len=60)
    ppo_llm.main(args)
    (row,) = csv.DictReader(open(tmp_path / "run/metrics.csv"))
    assert (float(row["dropped"]), float(row["truncated"])) == (2, 2)
    assert float(row["turns"]) == pytest.approx((4 * 3 + 2 * 1) / 6)  # of 2 ... 5, and of 6 and 7, cut short
    said = capsys.readouterr().out
    assert "update 1: the episode of seed 1000000 is dropped: RuntimeError: no start (reset)" in said
    assert "update 1: the episode of seed 1000001 is dropped: KeyError: 'no step' (turn 2)" in said
    actor = load_file(tmp_path / "run/agent_0/actor/adapter_model.safetensors")
    assert all(x.any() for name, x in actor.items() if "lora_B" in name)


def test_games_that_all_fail_end_the_run_in_a_line(loaded_model, tokenizer, clock, monkeypatch):
    monkeypatch.setattr(Scripted, "close", lambda self: 1 / 0, raising=False)
    args = make_args(max_model_len=40)
    model, agents = make_team(loaded_model, args)
    with pytest.raises(TaskError, match="the environment failed in all 1 episodes, at first with ZeroDivisionError"):
        (team,), _, _ = ppo_llm.play_env(model, agents[0], Scripted, [{"seed": 3}], args, tokenizer, seeded(), clock)
        collate(team, 0, args.num_turns, "cpu")


# --- Sampling ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def sampling(loaded_model, tokenizer, prompts):
    """generate of agents by number, greedily and of the five prompts if not told otherwise; and the model."""
    args = make_args(max_output_tokens=16)
    model, agents = make_team(loaded_model, args, agents=2, scale=0.03)
    asked = [tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts]

    def play(players, rows=range(5), greedy=True, **flags):
        flags = make_args(**{"max_output_tokens": 16} | flags)
        adapters = [agents[i].actor for i in players]
        return generate(model, adapters, [asked[k] for k in rows], flags, tokenizer, seeded(), greedy)

    return play, model, asked


def test_adapters_mixed_in_a_batch_say_what_each_says_alone(sampling):
    play, _, _ = sampling
    alone = [play([i] * 5) for i in (0, 1)]
    assert alone[0] != alone[1] and len({len(ids) for ids in alone[0] + alone[1]}) > 1
    assert play([0, 1, 0, 0, 1]) == [alone[i][k] for k, i in enumerate([0, 1, 0, 0, 1])]
    assert play([0] * 5 + [1] * 5, [*range(5)] * 2, hf_generate_chunk_size=3) == alone[0] + alone[1]
    assert play([0] * 5, hf_generate_chunk_size=2) == alone[0]
    assert [play([0], [k])[0] for k in range(5)] == alone[0]  # without padding


SAMPLING = [({}, {}), ({"repetition_penalty": 1.5},) * 2, ({"min_output_tokens": 8}, {"min_new_tokens": 8})]


@pytest.mark.parametrize("ours, theirs", SAMPLING, ids=["plain", "repetition penalty", "shortest"])
def test_greedy_sampling_equals_generate(sampling, ours, theirs):
    play, model, asked = sampling
    said = play([1] * 5, **ours)
    assert ours == {} or said != play([1] * 5)
    model.set_adapter("agent_1_actor")
    for prompt, answer in zip(asked, said):
        ids = torch.tensor([prompt])
        known = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 16}
        assert answer == model.generate(input_ids=ids, **known, **theirs)[0, len(prompt) :].tolist()


def test_filters_that_leave_one_token_sample_greedily(sampling):
    play, _, _ = sampling
    for flags in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}, {"temperature": 1e-4}):
        assert play([0] * 5, greedy=False, **flags) == play([0] * 5)
    assert play([0] * 5, greedy=False) != play([0] * 5)


# --- Runs -------------------------------------------------------------------------------------------------------------


def train(folder, **flags):
    """(agents, model) of a run."""
    models = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_llm, "add_adapters", lambda *given: models.append(add_adapters(*given)) or models[0])
        agents, _ = ppo_llm.main(make_args(folder, max_turns=2, evaluation_interval=0, **flags))
    return agents, models[0]


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stage")
    return folder / "run", *train(folder, env="guess")


@torch.no_grad()
def logits(model, adapter=None):
    if adapter:
        model.set_adapter(adapter)
    return model(IDS).logits


def check_saved(folder, model, name, base, out):
    live = logits(model, f"{name}_actor")
    opened = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder / name / "actor").eval()
    assert torch.equal(logits(opened), live) and (live - logits(base)).abs().max() > 1e-2
    merge(MergeArgs(str(folder / name), str(out)))
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    torch.testing.assert_close(logits(exported), live, atol=1e-4, rtol=0)


def test_a_saved_actor_opens_elsewhere(stage, loaded_model, tmp_path):
    folder, _, model = stage
    check_saved(folder, model, "agent_0", loaded_model, tmp_path / "out")


def test_the_saved_actors_of_a_team_open_elsewhere(loaded_model, tmp_path):
    _, model = train(tmp_path, task="number", num_agents=2)
    check_saved(tmp_path / "run", model, "agent_1", loaded_model, tmp_path / "out")
    assert not torch.equal(logits(model, "agent_0_actor"), logits(model, "agent_1_actor"))


@pytest.mark.parametrize("load_optimizer", [False, True])
def test_a_second_stage_starts_from_the_first(stage, tmp_path, monkeypatch, load_optimizer):
    first, (before,), _ = stage
    monkeypatch.setattr(ppo_llm, "batches", lambda *_: [])  # no update
    (agent,), _ = train(tmp_path, env="guess", load_checkpoint=str(first), load_optimizer=load_optimizer, seed=2)
    parts = [("actor", "actor"), ("reference", "actor"), ("critic", "critic")]
    for new, old in [(f"agent_0/{new}", f"agent_0/{old}") for new, old in parts]:
        loaded = load_file(tmp_path / "run" / new / "adapter_model.safetensors")
        saved = load_file(first / old / "adapter_model.safetensors")
        assert loaded.keys() == saved.keys() and all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert before.value_head.weight.any() and torch.equal(agent.value_head.weight, before.value_head.weight)
    assert [group["lr"] for group in agent.optimizers[0].param_groups] == [1e-2] * 2
    moments, saved = (x.optimizers[0].state_dict()["state"] for x in (agent, before))
    assert moments.keys() == (saved.keys() if load_optimizer else set())
    assert not load_optimizer or sum(state["exp_avg"].abs().sum() for state in moments.values()) > 0
    for k, state in moments.items():
        assert float(state["step"]) == 2 and all(torch.equal(x, saved[k][name]) for name, x in state.items())


@pytest.mark.parametrize("rollout, batches", [(4, [8]), (8, [8, 8])])
def test_a_team_samples_few_answers_in_one_batch_and_many_agent_by_agent(tmp_path, monkeypatch, rollout, batches):
    generate, sampled = ppo_llm.generate, []

    def watched(model, adapters, *rest):
        sampled.append(len(adapters))
        return generate(model, adapters, *rest)

    monkeypatch.setattr(ppo_llm, "generate", watched)
    flags = {"task": "number", "num_agents": 2, "max_turns": 1, "train_size": rollout, "rollout_buffer_size": rollout}
    ppo_llm.main(make_args(tmp_path, **flags, evaluation_interval=0))
    assert sampled == batches
