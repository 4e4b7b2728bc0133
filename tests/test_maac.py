"""maac_llm: what the critic reads, its values and targets, the team's reward, losses, one step for a mini-batch."""

import pytest
import torch
from helpers import make_args, randomise_value_head, seeded
from short_runs import train

import maac_llm
from utils.cli import UserError
from utils.tasks import number

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("critic_type", ["v", "q"])


def args_of(**flags):
    return make_args(script=maac_llm, num_turns=2, max_new_tokens=3, **flags)


def build_team(model, tokenizer, args):
    """Agents that differ from their reference, and a critic whose values are not 0."""
    torch.manual_seed(0)
    team = maac_llm.build_agents(args, CPU, 10, model, tokenizer)
    with torch.no_grad():
        for agent in team[:-1]:
            for parameter in agent.actor.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=seeded(1))
    return [*team[:-1], randomise_value_head(team[-1])]


def play(team, args, size=8):
    """Rollouts of games of two turns, of which some end after the first, with rewards of each agent's own."""
    items = [*number.train_dataset(size, 0)]
    rollouts = maac_llm.play(team[:-1], number, items, args, seeded())
    for i, rollout in enumerate(rollouts):
        rollout.rewards = torch.randn(rollout.rewards.shape, generator=seeded(i)) * rollout.played
    return rollouts


@pytest.fixture
def ends_early(monkeypatch):
    """Every third game ends after its first turn."""
    transition = number.external_transition

    def external_transition(agent_completions, num_agents, prompt_history_per_agent, item):
        if int(item["share"] * 1000) % 3 == 0:
            return None
        return transition(["1", "1"], num_agents, prompt_history_per_agent, item)

    monkeypatch.setattr(number, "external_transition", external_transition)


@BOTH
def test_the_critic_reads_what_all_agents_read_in_a_fixed_order(critic_type, model, tokenizer, ends_early):
    args = args_of(critic_type=critic_type)
    *agents, critic = team = build_team(model, tokenizer, args)
    rollouts = play(team, args)
    assert not rollouts[0].played.all() and rollouts[0].played[:, 1].any()
    read = maac_llm.read_together(critic, rollouts, args)
    T = 2
    assert read.ids.shape[:2] == (8, 2 * T if critic_type == "q" else T)
    for k in range(8):
        for t in range(read.ids.shape[1]):
            tokens = read.ids[k, t][read.attention_mask[k, t] > 0].tolist()
            if not rollouts[0].played[k, t % T]:
                assert tokens == [] and not read.played[k, t]
                continue
            texts = [
                "Agent 0 reads:",
                rollouts[0].prompts[k][t % T],
                "",
                "Agent 1 reads:",
                rollouts[1].prompts[k][t % T],
            ]
            if t >= T:
                texts += ["", "Agent 0 writes:", rollouts[0].responses[k][t % T]]
                texts += ["", "Agent 1 writes:", rollouts[1].responses[k][t % T]]
            assert tokens[:-1] == tokenizer("\n".join(texts), add_special_tokens=False).input_ids


def team_reward(batches, k, t, args):
    """The mean reward less the penalty of all agents' tokens, in float64."""
    reward = sum(float(batch.rewards[k, t]) for batch in batches) / len(batches)
    for batch in batches:
        for column in range(batch.logprobs.shape[-1]):
            if batch.response_mask[k, t, column]:
                log_ratio = float(batch.logprobs[k, t, column]) - float(batch.reference_logprobs[k, t, column])
                reward -= args.kl_coef * log_ratio
    return reward


def batches_of(team, rollouts, args):
    batches = []
    for agent, rollout in zip(team, rollouts):
        reference = maac_llm.compute_logprobs(agent.reference, rollout, args)
        mask = rollout.played[..., None].float()
        weights = torch.ones_like(rollout.logprobs)
        batches.append(maac_llm.Batch(**vars(rollout), action_mask=mask, reference_logprobs=reference, weights=weights))
    return batches


def test_the_team_has_the_mean_reward_less_the_penalty_of_the_joint_response(model, tokenizer, ends_early):
    args = args_of(reward_normalization=False, kl_coef=0.5)
    team = build_team(model, tokenizer, args)
    batches = batches_of(team, play(team, args), args)
    rewards = maac_llm.joint_rewards(batches, args)
    for k, t in batches[0].played.nonzero().tolist():
        assert rewards[k, t, 0] == pytest.approx(team_reward(batches, k, t, args), abs=1e-5)
    assert (batches[0].logprobs - batches[0].reference_logprobs).abs().max() > 0.05


@BOTH
def test_advantages_and_targets_are_those_of_a_loop(critic_type):
    args = args_of(critic_type=critic_type, gamma=0.9)
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])[..., None]
    rewards = torch.randn(3, 2, 1, generator=seeded()) * mask
    values = torch.randn(3, 4 if critic_type == "q" else 2, 1, generator=seeded(1))
    advantages, returns = maac_llm.estimate(rewards, values, mask, args)
    for k in range(3):
        V = [float(values[k, t]) for t in range(2)]
        Q = [float(values[k, 2 + t]) for t in range(2)] if critic_type == "q" else V
        for t in range(2):
            goes_on = t == 0 and mask[k, 1] > 0
            target = float(rewards[k, t]) + (0.9 * Q[1] if goes_on else 0.0)
            advantage = (Q[t] if critic_type == "q" else target) - V[t]
            played = float(mask[k, t])
            assert advantages[k, t] == pytest.approx(advantage * played, abs=1e-6)
            assert returns[k, t] == pytest.approx(target * played, abs=1e-6)
            if critic_type == "q":  # Q descends to the same target as V
                assert returns[k, 2 + t] == returns[k, t]


def test_the_gradient_of_an_actor_is_that_of_the_dense_formula(model, tokenizer, ends_early):
    args = args_of(entropy_coef=0.1, mini_batch_size=8)
    team = build_team(model, tokenizer, args)
    batches = batches_of(team, play(team, args), args)
    for batch in batches:
        batch.advantages = torch.randn(8, 2, 1, generator=seeded(5)) * batch.action_mask
    (minibatches,) = maac_llm.minibatches(batches, args, seeded())
    agent, batch = team[0], minibatches[0]
    for part in batch.split(3):
        maac_llm.maac_loss(agent, part, args)[0].backward()
    gradients = [parameter.grad.clone() for parameter in agent.actor.parameters()]

    agent.actor.zero_grad()
    loss = 0.0
    played = batch.played.nonzero().tolist()
    num_tokens = int(batch.response_mask.sum())
    for k, t in played:
        is_token = batch.attention_mask[k, t] > 0
        ids = batch.ids[k, t][is_token]
        length = int(batch.response_mask[k, t].sum())
        log_pi = agent.actor(ids[None, :-1]).logits[0, -length:].double().log_softmax(-1)
        logprobs = log_pi[torch.arange(length), ids[-length:]]
        loss -= logprobs.sum() * float(batch.advantages[k, t]) / len(played)
        loss -= 0.1 * -(log_pi.exp() * log_pi).sum() / num_tokens
    loss.backward()
    for parameter, gradient in zip(agent.actor.parameters(), gradients):
        torch.testing.assert_close(parameter.grad, gradient, atol=2e-5, rtol=1e-3)


@BOTH
def test_the_gradient_of_the_critic_is_that_of_the_plain_squared_error(critic_type, model, tokenizer, ends_early):
    args = args_of(critic_type=critic_type, mini_batch_size=8)
    *_, critic = team = build_team(model, tokenizer, args)
    read = maac_llm.read_together(critic, play(team, args), args)
    returns = torch.randn(read.response_mask.shape, generator=seeded(2))
    batch = maac_llm.Batch(**vars(read), action_mask=read.response_mask, returns=returns)
    ((minibatch,),) = maac_llm.minibatches([batch], args, seeded())
    for part in minibatch.split(3):
        maac_llm.value_loss(critic, part, args)[0].backward()
    parameters = [*critic.critic.parameters(), *critic.value_head.parameters()]
    gradients = [parameter.grad.clone() for parameter in parameters]

    for parameter in parameters:
        parameter.grad = None
    loss = 0.0
    played = read.played.nonzero().tolist()
    for k, t in played:
        ids = read.ids[k, t][read.attention_mask[k, t] > 0][None, :-1]
        value = critic.value_head(critic.critic(ids).last_hidden_state[0, -1])
        loss += (value - float(returns[k, t])) ** 2 / len(played)
    loss.backward()
    for parameter, gradient in zip(parameters, gradients):
        torch.testing.assert_close(parameter.grad, gradient, atol=2e-5, rtol=1e-3)


def learn_once(model, tokenizer, **flags):
    """(team, names of the learners in the order of their steps) of an update in four joint mini-batches of two."""
    args = args_of(mini_batch_size=2, **flags)
    *agents, critic = team = build_team(model, tokenizer, args)
    rollouts = play(team, args)
    steps = []
    for k, learner in enumerate(team):
        assert len(learner.optimizers) == 1
        learner.optimizers[0].register_step_post_hook(lambda *_, k=k: steps.append(k))
    maac_llm.learn(agents, critic, rollouts, args, seeded(4))
    return team, steps


def test_each_learner_makes_one_step_for_a_joint_mini_batch(model, tokenizer):
    _, steps = learn_once(model, tokenizer, critic_type="q", ac_epochs=2)
    assert steps == [0, 1, 2] * 8


def test_steps_of_the_critic_change_no_bit_of_an_actor_in_the_same_update(model, tokenizer):
    (*slow, critic), _ = learn_once(model, tokenizer, critic_learning_rate=0.0)
    (*quick, other), _ = learn_once(model, tokenizer, critic_learning_rate=0.1)
    for agent, same in zip(slow, quick):
        for one, two in zip(agent.actor.parameters(), same.actor.parameters()):
            assert torch.equal(one, two)
    assert not torch.equal(critic.value_head[0].weight, other.value_head[0].weight)


def test_a_joint_mini_batch_has_the_same_episodes_for_all(model, tokenizer, ends_early):
    args = args_of(mini_batch_size=4)
    *_, critic = team = build_team(model, tokenizer, args)
    rollouts = play(team, args)
    batches = batches_of(team, rollouts, args)
    read = maac_llm.read_together(critic, rollouts, args)
    batches.append(maac_llm.Batch(**vars(read), action_mask=read.response_mask))
    for one, two, texts in maac_llm.minibatches(batches, args, seeded()):
        assert one.prompts == texts.prompts and two.responses != one.responses
        assert torch.equal(one.played, texts.played) and torch.equal(one.raw_rewards, two.raw_rewards)


def test_the_critic_reads_the_end_of_a_text_that_is_too_long(model, tokenizer):
    args = args_of()
    *_, critic = team = build_team(model, tokenizer, args)
    rollouts = play(team, args)
    whole = maac_llm.read_together(critic, rollouts, args)
    critic.critic.config.max_position_embeddings = 20
    with pytest.warns(UserWarning, match="the critic has 20 positions: of texts with more tokens it reads the last"):
        cut = maac_llm.read_together(critic, rollouts, args)
    assert cut.ids.shape[-1] == 21 < whole.ids.shape[-1]
    assert torch.equal(cut.ids[0, 0], whole.ids[0, 0, -21:])


def test_a_run_leaves_the_critic_which_alone_has_values(in_tmp_path):
    team, run = train("maac", folder="run", critic_type="q")
    assert len(team) == 3
    assert {path.parent.name for path in run.folder.glob("*/config.json")} == {"agent_0", "agent_1", "critic"}
    names = run.rows[0].keys()
    assert {"critic/value_loss", "critic/grad_norm", "critic/explained_variance"} <= names
    assert "agent_0/value_loss" not in names and "agent_0/explained_variance" not in names


def test_a_critic_of_its_own_name_has_its_own_tokenizer(small_model, model, tokenizer):
    args = args_of(critic_model_name_or_path=small_model, critic_value_head_hidden_dim=5)
    *_, critic = maac_llm.build_agents(args, CPU, 10, model, tokenizer)
    assert critic.critic.config.hidden_size == 32 and critic.value_head[0].out_features == 5
    assert critic.tokenizer.chat_template != tokenizer.chat_template


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"critic_model_name_or_path": "nowhere"}, "--critic-model-name-or-path takes a model's folder or a hub name"),
        ({"critic_model_config": {"hidden_size": 8}}, "--critic-model-config has no effect without --critic-model"),
    ],
)
def test_bad_flags_of_the_critic_are_one_line(flags, message, in_tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=message) as error:
        train("maac", **flags)
    assert "\n" not in str(error.value)
