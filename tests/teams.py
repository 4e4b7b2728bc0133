"""Teams of adapters on a base of some thousand parameters, and what their policies compute."""

import torch

import ippo_llm
import ppo_llm
from utils import models
from utils.models import stages

IDS = torch.arange(5, 25).reshape(2, 10)


def make_args(script=ippo_llm, **flags):
    """Flags of two agents on a base that is called some/base; flags that a script lacks are left out."""
    small = {"num_agents": 2, "model": "some/base", "lora_rank": 4, "lora_alpha": 8.0, "use_separate_critic": True}
    if "lora_config" in flags:
        del small["lora_rank"], small["lora_alpha"]
    if flags.get("lora_rank") == 0:
        del small["lora_alpha"]
    known = script.Args.__dataclass_fields__
    return script.Args(**{name: value for name, value in (small | flags).items() if name in known})


def make_team(base, tokenizer, script=ppo_llm, **flags):
    """Agents on a copy of the base, as a run begins with them; ppo's have references of their own."""
    args = make_args(script, **flags)
    torch.manual_seed(1)
    initials = models.load(args, base, tokenizer)
    agents = [script.Agent(i, initial, 10, args) for i, initial in enumerate(initials)]
    if args.load_checkpoint:
        stages.load_stage(agents, args)
    return agents


def roles_of(agent):
    """{role: Policy}, the reference last."""
    return {role: getattr(agent, role) for role in ("actor", "critic", "reference") if getattr(agent, role, None)}


def shake(agents, scale=0.2, seed=4):
    """Let agents be as if they had learned: every parameter of actors, critics and value heads is another."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for agent in agents:
            policies = [policy for role, policy in roles_of(agent).items() if role != "reference"]
            for learner in [*policies, agent.value_head]:
                for parameter in learner.parameters():
                    parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return agents


def logits_of(policy):
    """What a policy says, with gradients, and so with adapters apart; of a critic it is what its adapters would say."""
    with policy.active():
        model = policy.model if policy.adapter is None else policy.model.get_base_model()
        return model(IDS).logits.detach()


def same_policy(one, other, tolerance=0.0):
    return torch.allclose(logits_of(one), logits_of(other), atol=tolerance, rtol=0)
