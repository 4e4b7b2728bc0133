"""vLLM in place of a script's own sampler (--use-vllm): an engine in the process that learns.

Before it samples, it is handed the weights of an agent, or the adapters of all agents on a base. Then log-probabilities
of both are compared: the run ends where they are too far apart.
"""

import atexit
import contextlib
import copy
import dataclasses
import functools
import importlib.util
import json
import os
import random
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy
import torch
from transformers import set_seed
from transformers.core_model_loading import revert_weight_conversion

from utils import distributed
from utils.cli import UserError, one_line
from utils.models import adapters, causal_lm
from utils.models.tensors import fingerprint, is_of_adapter, plain

ENVIRONMENT = {  # variables of vLLM, where the user has not set them
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
FIXED = {  # settings of vLLM
    "disable_log_stats": True,
    "generation_config": "vllm",  # none of the model's own
    "load_format": "trainer",
    "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
    "skip_tokenizer_init": True,
}
REFUSED = (  # settings that follow from the scripts' flags, or that would take several devices for an engine
    "model enable_lora max_loras max_lora_rank max_logprobs seed trust_remote_code tensor_parallel_size "
    "pipeline_parallel_size data_parallel_size distributed_executor_backend"
).split()
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for
NOT_IN_VLLM = ("use_dora", "modules_to_save")  # fields of a LoRA configuration
LEAST_TEMPERATURE = 0.01  # vLLM raises others to it

NUM_PROMPTS = 4  # that are tried after a hand-over
NUM_TOKENS = 32  # of each
NUM_NEXT = 20  # likeliest next tokens of each, whose log-probabilities are compared
LARGEST_DIFFERENCE = 1e-3  # on average, in nats
LARGEST_DIFFERENCE_IN_HALF_PRECISION = 0.2


def check_vllm_args(args):
    """Raise UserError where vLLM is asked for and is not there, or does not have its settings."""
    if not args.use_vllm:
        return
    if importlib.util.find_spec("vllm") is None:
        raise UserError("--use-vllm takes vLLM, which is not installed: docs/many_devices.md says how")
    takes = {each.name for each in dataclasses.fields(load_vllm().EngineArgs)}
    for key in args.vllm_config:
        if key in FIXED or key in REFUSED:
            raise UserError(f"--vllm-config {key}: it can't be set, as scripts have one way to use vLLM")
        if key not in takes:
            raise UserError(f"--vllm-config takes settings of vllm.EngineArgs, got {key}")


def max_length(config, args):
    """The most tokens that a model may read, or None: by its configuration, vLLM's settings, and --max-model-len."""
    limits = [getattr(config.get_text_config(), "max_position_embeddings", None), args.vllm_config.get("max_model_len")]
    limits.append(getattr(args, "max_model_len", None))
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def wanted_length(config, args):
    """What an engine is told of that: None, its own limit, without --max-model-len."""
    return max_length(config, args) if args.max_model_len else None


@functools.cache
def load_vllm():
    """The package, whose engines are to be in this process, with weights that can be replaced. Raises UserError."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
        import vllm._custom_ops
        import vllm.lora.request
        import vllm.model_executor.layers.utils
    except Exception as error:
        raise UserError(f"--use-vllm: vLLM can't be imported: {one_line(error)}") from error
    vllm._custom_ops._supports_onednn = False  # it would pack weights, on CPUs
    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda *_: False  # so would this, in bfloat16, with AMX
    return vllm


engines = {}  # of this process; they stay, as one that ends leaves the group of all processes


def hand_over(agent, agents, args):
    """Give vLLM an agent's weights of now, which are whole, or those of its adapters. Raises UserError."""
    actor = agent.actor
    if actor.adapter is None:
        longest = args.max_prompt_length and args.num_turns == 1 and args.max_prompt_length + args.max_new_tokens
        agent.engine = find_engine(actor.model, args, longest or wanted_length(actor.config, args))
        agent.engine.owner = None  # whatever it has is old
        return
    same_base = [each for each in agents if each.actor.model is actor.model]
    adapters.unmerge(actor.model)
    agent.engine = get_adapter_engine(actor.model, args, len(same_base))
    agent.engine.hand_over_adapter([*dict.fromkeys(same_base)].index(agent), actor)


def generate(agent, contexts, args, generator):
    """Continue R lists of ids, with the weights that were handed over last: R lists of new ids."""
    number = None
    if agent.actor.adapter is None:
        agent.engine.hand_over(agent.actor)  # agents of one architecture share an engine
    else:
        number = agent.engine.adapters.index(agent.actor.adapter)
    return agent.engine.sample(contexts, args, agent.end_ids.tolist(), generator, [number] * len(contexts))


def get_adapter_engine(model, args, num_adapters):
    """An engine of vLLM for so many adapters of one configuration on one base, of a PeftModel. Raises UserError."""
    base = model.get_base_model()
    config = next(iter(model.peft_config.values()))
    if base.device.type == "cuda" and args.dtype == "float32" and not causal_lm.is_in_bfloat16(base):
        raise UserError("--use-vllm takes adapters in bfloat16 on a GPU: add --mixed-precision bf16")
    for name in NOT_IN_VLLM:
        if getattr(config, name):
            raise UserError(f"--use-vllm takes no adapters with {name}, which vLLM does not have")
    rank = max([config.r, *config.rank_pattern.values()])
    return find_engine(base, args, wanted_length(base.config, args), rank, num_adapters)


def find_engine(model, args, longest=None, rank=None, num_adapters=0):
    """An engine of vLLM for models of one configuration, or for the adapters on one base. Raises UserError.

    `longest`: tokens that prompt and response may have together, None for the model's own limit. With `rank` it takes
    `num_adapters` adapters of at most that rank. An engine that serves another agent, or an earlier run, serves this
    one too: it has the weights that it was handed last.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    half = args.dtype == "bfloat16" or causal_lm.is_in_bfloat16(model)
    settings = FIXED | {
        "distributed_executor_backend": "external_launcher" if distributed.world_size() > 1 else "uni",
        "dtype": "bfloat16" if half else "float32",
        "enforce_eager": model.device.type == "cpu",
        "gpu_memory_utilization": 0.4,
        "max_model_len": longest,
        "trust_remote_code": args.trust_remote_code,
    }
    base = None
    if rank:
        max_rank = min((size for size in LORA_RANKS if size >= rank), default=rank)
        settings |= {"enable_lora": True, "max_loras": num_adapters, "max_lora_rank": max_rank}
        base = fingerprint(model)
    settings |= args.vllm_config
    shape = config.to_dict() | {"_name_or_path": None}
    key = json.dumps([shape, settings, base], sort_keys=True, default=str)
    if key not in engines:
        engines[key] = Engine(model, config, settings)
    return engines[key]


class Engine:
    """An engine, beginning with a model's weights. It leaves all random generators as they are."""

    def __init__(self, model, config, settings):
        self.vllm = load_vllm()
        self.device = model.device
        self.owner = None  # the model whose weights it has
        self.adapters = []  # names of those that it has
        self.folder = memory_folder()
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        config.save_pretrained(self.folder)
        weights = weights_of(model)
        register_loader(weights)
        try:
            with random_state_kept(self.device), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                self.llm = self.vllm.LLM(model=str(self.folder), **settings)
        except Exception as error:
            reason = f"{type(error).__name__}: {one_line(error, 500)}"
            raise UserError(f"--use-vllm: the engine does not start: {reason}") from error
        weights.clear()
        atexit.register(self.llm.llm_engine.engine_core.shutdown)  # before the processes part

    @torch.no_grad()
    def hand_over(self, actor):
        """Give the engine a model's weights. Raises UserError where it then does not compute what the model does."""
        if self.owner is not actor.model:
            self.load_weights(actor.model)
            self.check(actor)
            self.owner = actor.model

    @torch.no_grad()
    def hand_over_adapter(self, i, actor):
        """Give the engine adapter i. Raises UserError where it then computes something else."""
        if i == 0:
            self.adapters = []
        self.adapters.append(actor.adapter)
        self.load_adapter(i, lambda path: adapters.save_adapter(path, actor.model, actor.adapter, actor.name))
        self.check(actor, i)

    def load_weights(self, model):
        """Replace all weights by a model's."""
        weights = weights_of(model)
        self.llm.apply_model(lambda model_there: model_there.load_weights(weights.items()) and None)
        self.llm.reset_prefix_cache()

    def load_adapter(self, i, save):
        """Replace adapter i by what save(folder) writes, in peft's format. Raises UserError where vLLM lacks it."""
        save(self.folder / f"agent_{i}")
        try:
            self.llm.llm_engine.add_lora(self.request(i, load_inplace=True))
        except ValueError as error:
            raise UserError(f"--use-vllm does not take these adapters: {one_line(error)}") from error
        self.llm.reset_prefix_cache()

    def request(self, i, load_inplace=False):
        """What stands for adapter i."""
        folder = self.folder / f"agent_{i}"
        return self.vllm.lora.request.LoRARequest(f"agent_{i}", i + 1, str(folder), load_inplace=load_inplace)

    def check(self, actor, i=None):
        """Raise UserError where next tokens are not as likely as the actor has them; with i, adapter i is on."""
        num_tokens = min(NUM_TOKENS, self.llm.model_config.max_model_len - 1)
        ids = torch.arange(NUM_PROMPTS * num_tokens, device=self.device).view(NUM_PROMPTS, num_tokens)
        ids = ids * 7 % self.llm.model_config.get_vocab_size()
        settings = {"temperature": 1.0, "max_tokens": 1, "logprobs": NUM_NEXT}
        outputs = self.generate(ids.tolist(), settings, 0, [i] * NUM_PROMPTS)
        logprobs = actor.next_token(ids, torch.ones_like(ids)).logits.log_softmax(-1).tolist()
        differences = []
        for row, output in zip(logprobs, outputs):
            for token, entry in output.logprobs[0].items():
                differences.append(abs(entry.logprob - row[token]))
        mean = sum(differences) / len(differences)
        half = self.llm.model_config.dtype != torch.float32
        largest = LARGEST_DIFFERENCE_IN_HALF_PRECISION if half else LARGEST_DIFFERENCE
        if not mean <= largest:
            reason = f"log-probabilities differ by {mean:.2g} nats on average, and {largest:g} is allowed"
            raise UserError(f"--use-vllm: the weights in the engine are not those that were handed over: {reason}")

    def sample(self, prompts, args, end_ids, generator, numbers):
        """Continue prompts, lists of ids, by the adapters of these numbers: of each the new ids. Raises UserError."""
        greedy = not args.do_sample
        settings = {
            "max_tokens": args.max_new_tokens,
            "min_tokens": args.min_output_tokens,
            "stop_token_ids": end_ids,
            "temperature": 0.0 if greedy else args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k,
            "min_p": args.min_p,
            "repetition_penalty": args.repetition_penalty,
        }
        most = self.llm.model_config.max_model_len
        longest = max(len(prompt) for prompt in prompts)
        if longest + settings["max_tokens"] > most:
            sizes = f"{settings['max_tokens']} new ones after a prompt of {longest}"
            raise UserError(f"--vllm-config: max_model_len, {most} tokens, has no room for {sizes}")
        if 0 < settings["temperature"] < LEAST_TEMPERATURE:
            raise UserError(f"--use-vllm takes a temperature from {LEAST_TEMPERATURE}, got {settings['temperature']}")
        seed = 0
        if settings["temperature"] > 0:
            device = generator.device if generator else None
            seed = int(torch.randint(2**31, (1,), generator=generator, device=device))
        return [list(output.token_ids) for output in self.generate(prompts, settings, seed, numbers)]

    def generate(self, prompts, settings, seed, adapters=None):
        """What vLLM makes of the prompts."""
        try:
            params = self.vllm.SamplingParams(detokenize=False, ignore_eos=True, **settings)
        except ValueError as error:  # a temperature or --top-p that it does not take
            raise UserError(f"--use-vllm: {one_line(error)}") from error
        requests = None
        if adapters and adapters[0] is not None:
            requests = [self.request(i) for i in adapters]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        with random_state_kept(self.device):
            set_seed(seed)
            outputs = self.llm.generate(inputs, params, use_tqdm=False, lora_request=requests)
        return [output.outputs[0] for output in outputs]


@contextlib.contextmanager
def random_state_kept(device):
    """Within it all global random generators may be used: they are put back."""
    python_state = random.getstate()
    numpy_state = numpy.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        try:
            yield
        finally:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


def memory_folder():
    """A new folder, in memory where the system has a disk there with room."""
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > 2**30
    return Path(tempfile.mkdtemp(prefix="vllm_", dir=memory if has_room else None))


def weights_of(model):
    """A model's weights without its adapters, by the names that they have in files."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                weights[name] = buffer
    weights = {plain(name): x.detach() for name, x in weights.items() if not is_of_adapter(name)}
    return revert_weight_conversion(model, weights)


def register_loader(weights):
    """Let the next engine start with these weights."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(FIXED["load_format"])
    class Loader(BaseModelLoader):
        def download_model(self, model_config):
            pass

        def load_weights(self, model, model_config):
            model.load_weights(weights.items())
