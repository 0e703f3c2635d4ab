"""The slips of fingers in a request before it reaches the model: lower case, missing full stops, typing errors."""

import random

from tools.bundled_model.requests import KNOWN

_NEIGHBOURS = dict(zip("qwertyuiopasdfghjklzxcvbnm", "wqrewyutoisapfdhgkjlxzvcmn", strict=True))


def noisy(text: str, rng: random.Random) -> str:
    """The text as somebody in a hurry might type it; most texts stay as they are."""
    if rng.random() < 0.3:
        text = text.lower()
    elif rng.random() < 0.02:
        text = text.upper()
    if rng.random() < 0.3:
        text = text.rstrip(".?!")
    elif rng.random() < 0.06:
        text = text.rstrip(".?") + rng.choice(("?", "??", "!", "!!!", "...", " .", ".?", " ;)"))
    if rng.random() < 0.12:
        words = text.split(" ")
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            index = rng.randrange(len(words))
            # The word that says what is asked for is rarely mistyped: with it the answer could only be guessed.
            if words[index].lower().strip(".,?!") not in KNOWN or rng.random() < 0.3:
                words[index] = _mistyped(words[index], rng)
        text = " ".join(words)
    if rng.random() < 0.05:
        text = text.replace(" a ", " ").replace(" the ", " ")
    if rng.random() < 0.02:
        text = rng.choice((f" {text}", f"{text} ", f"{text}\n", text.replace(" ", "  "), f'"{text}"', f"\n{text}"))
    return text or "."


def _mistyped(word: str, rng: random.Random) -> str:
    if len(word) < 3:
        return word
    at = rng.randrange(len(word) - 1)
    changed = rng.choice((
        word[:at] + word[at + 1] + word[at] + word[at + 2 :],
        word[:at] + word[at + 1 :],
        word[:at] + word[at] + word[at:],
        word[:at] + _NEIGHBOURS.get(word[at], "e") + word[at + 1 :],
    ))  # fmt: skip
    # "hen" for "hne" must not turn one known word into another.
    return word if changed.lower().strip(".,?!") in KNOWN else changed
