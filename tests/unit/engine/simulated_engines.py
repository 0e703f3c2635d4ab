"""Engines on the simulated runner: any pretended token depends on every token before it and on where it is kept."""

import time
from itertools import islice

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from contract.domain.params import SamplingParams
from penstock.engine import LLMEngine
from penstock.outputs import RequestOutput
from penstock.prompts import PromptLike
from scheduler_svc.core.config import SchedulerConfig
from servicekit.checkpoint.grammars import GrammarTokens
from tokenizer_svc.core.chat import ChatTemplates
from tokenizer_svc.core.vocabulary import Vocabulary
from worker_svc.core.interface import Limits
from worker_svc.core.pretended_model import expected_tokens
from worker_svc.core.simulated import SimulatedConfig, SimulatedRunner

EOS = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def make_vocabulary(context_length: int = 512) -> Vocabulary:
    """One token for each byte, and `<eos>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return Vocabulary(
        tokenizer,
        257,
        (EOS,),
        context_length,
        ChatTemplates({"default": CHAT_TEMPLATE}, {}),
        grammar_tokens=GrammarTokens(lambda: tokenizer, 257),
    )


def make_limits(**changes: int) -> Limits:
    """Plenty of everything, unless changed."""
    values = {
        "num_blocks": 512,
        "block_size": 4,
        "max_num_seqs": 32,
        "max_model_len": 512,
        "max_num_batched_tokens": 256,
    }
    return Limits(**{**values, **changes}, vocab_size=257, eos_token_ids=(EOS,))


def make_engine(
    *,
    limits: Limits | None = None,
    plans_in_flight: int = 2,
    eos_every: int = 0,
    seed: int = 0,
    enable_prefix_caching: bool = True,
    scheduling_policy: str = "fcfs",
    step_s: float = 0.0,
) -> LLMEngine:
    limits = limits or make_limits()
    vocabulary, behaviour = make_vocabulary(), SimulatedConfig(step_s=step_s, eos_every=eos_every)
    runner = SimulatedRunner(limits, behaviour, time.monotonic_ns, time.sleep, vocabulary.grammar_tokens)
    config = SchedulerConfig(
        scheduling_policy=scheduling_policy,
        plans_in_flight=plans_in_flight,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )
    return LLMEngine(vocabulary, runner, config, seed=seed)


def run(engine: LLMEngine, requests: dict[str, tuple[PromptLike, SamplingParams]]) -> dict[str, RequestOutput]:
    """Everything at once, until it has ended."""
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params)
    return drain(engine)


def drain(engine: LLMEngine) -> dict[str, RequestOutput]:
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert output.request_id not in finished
                finished[output.request_id] = output
    return finished


def expected(prompt: list[int], count: int, params: SamplingParams | None = None, seed: int = 0) -> list[int]:
    """What the runner pretends for one sequence that nothing disturbs."""
    params = params or SamplingParams(temperature=0)
    return list(islice(expected_tokens(prompt, params.sampling, seed, make_limits()), count))


def token_ids(output: RequestOutput, index: int = 0) -> list[int]:
    return output.outputs[index].token_ids
