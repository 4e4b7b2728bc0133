"""A run's folder as agents, in one call from Python; safetensors and JSON are read, and no code is run for it."""

from dataclasses import fields
from pathlib import Path

from utils import distributed
from utils.cli import UserError, flags_of
from utils.models import adapters
from utils.models.engine import VllmArgs
from utils.models.loading import check_models
from utils.models.lora import SHORT_FORM, read_config
from utils.models.stages import StageArgs
from utils.run import checkpoint

MODELS = {"model": "model_config", "critic_model_name_or_path": "critic_model_config"}  # flags, and their settings


def load(folder, script, device=None, updates=1, model=None, tokenizer=None, **flags):
    """The agents of a run as they are in its newest whole checkpoint, and their flags: (agents, args).

    `script` is the run's, imported: ppo_llm. `device`: None is this process's. Learning rates would take `updates` more
    updates. `model` and `tokenizer` are main's, for a run that had them. `flags` stand in for the run's own;
    --trust-remote-code, --shard and --use-vllm are off unless they are among them. What the run itself started from
    (--load-checkpoint) is not needed, nor its task or environment. Raises UserError.
    """
    saved = flags_of(folder, script.Args, "load")
    path, _ = checkpoint.newest_whole(Path(folder) / "checkpoints")
    if path is None:
        raise UserError(f"load: {folder} has no checkpoint")
    saved |= {"trust_remote_code": False, "shard": False, "resume": None, "fork": None}
    replaced = {field.name for field in fields(VllmArgs)}
    if "lora_config" in saved:  # the adapters' shape is that of their files
        replaced |= {*SHORT_FORM, *(field.name for field in fields(StageArgs))}
        saved["lora_config"] = read_config(path / "agent_0/actor")
    own = {name: value for name, value in saved.items() if name not in replaced}
    args = script.Args(**(own | flags))
    for name, settings in MODELS.items():
        if getattr(args, name, None):
            check_models(name, settings, args, model if name == "model" else None, quantized=True)
    device = distributed.start() if device is None else device
    agents = script.build_agents(args, device, updates, model, tokenizer)
    has_adapters = isinstance(agents[0].actor, adapters.Adapter)
    (adapters if has_adapters else checkpoint).load_agents(path, agents)
    return agents, args
