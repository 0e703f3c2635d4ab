"""From logits to tokens: changes of logits, cuts, the draw, logprobs."""
