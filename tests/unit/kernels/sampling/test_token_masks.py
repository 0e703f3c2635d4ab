"""Grammars on a device: the kernel, and tokens that follow a grammar whichever runner draws them."""

import re

import pytest
import torch
from kernel_inputs import DEVICE, LINES
from plans import Drive, drive
from runner_configs import CONFIG
from test_triton_runner import make_runner
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from contract.domain.params import Sampling
from servicekit.checkpoint.grammars import GrammarTokens
from worker_svc.compute import TorchCompute, TritonCompute
from worker_svc.core.changes import keep_masked
from worker_svc.core.kernels.sampling import token_masks
from worker_svc.core.kernels.sampling.changes import TokenMasks

EOS = 2


def byte_tokens() -> GrammarTokens:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return GrammarTokens(lambda: tokenizer, CONFIG.decoder.vocab_size)


@pytest.mark.parametrize("vocab_size", [31, 64, 211, 2049])
def test_tokens_without_a_bit_are_taken_out_of_the_rows_that_have_a_mask(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator).to(DEVICE)
    num_words = -(-vocab_size // 32)
    words = torch.randint(-(2**31), 2**31, (2, num_words), generator=generator).to(torch.int32).to(DEVICE)
    masks = TokenMasks(torch.tensor([3, 0], device=DEVICE), words)
    found, expected = logits.clone(), logits.clone()
    token_masks.keep_masked(found, masks)
    keep_masked(expected, masks)
    assert torch.equal(found, expected)
    for row, mask in ((3, 0), (0, 1)):
        allowed = [bool(int(words[mask, token // 32]) >> token % 32 & 1) for token in range(vocab_size)]
        assert (found[row] > -torch.inf).tolist() == allowed
    assert torch.equal(found[[1, 2, 4]], logits[[1, 2, 4]])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="exact in the interpreter only")
@pytest.mark.parametrize("window", [1, 3])
def test_an_output_follows_its_grammar_in_every_batch(window: int) -> None:
    both = []
    for compute in (TorchCompute(""), TritonCompute("", DEVICE, LINES)):
        runner = make_runner(CONFIG, compute)
        runner.take_grammars(byte_tokens())
        grammar = Sampling(temperature=1.0, grammar="start: /[a-d]{3,6}[0-9]/")
        likely = Sampling(temperature=0.0, grammar="start: /[a-d]{3,6}[0-9]/", num_logprobs=2)
        drives = [
            Drive([5, 6, 7] * 11, 10, grammar, seed=1, eos_token_ids=(EOS,)),
            Drive([9], 9, Sampling(temperature=1.0), seed=2),
            Drive([40, 41], 10, likely, seed=3, eos_token_ids=(EOS,)),
        ]
        drive(runner, drives, chunk=24, window=window, stagger=2)
        both.append([each.output for each in drives])
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        for each in (drives[0], drives[2]):
            text, _, rest = "".join(alphabet[token] for token in each.output).partition(alphabet[EOS])
            assert re.fullmatch("[a-d]{3,6}[0-9]", text)
            assert set(rest) <= {alphabet[EOS]}
    assert both[0] == both[1]
