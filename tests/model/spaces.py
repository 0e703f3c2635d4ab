"""The spaces that every run of the tests exhausts: together they have every fault, each near what it can hurt."""

from samplers import Kind
from world import Faults, Space

ALL_KINDS = tuple(Kind)


def named(*names: str) -> frozenset[str]:
    """Which processes something may happen to."""
    return frozenset(names)


SPACES = [
    Space("undisturbed", kinds=ALL_KINDS, max_tokens=3, compacts=True),
    Space("two samples", samples=2, kinds=(Kind.PLAIN, Kind.STOP), is_warm=True),
    Space("two requests", requests=2, schedulers=2, max_tokens=1, faults=Faults(pauses=1), pausing=named("scheduler0")),
    Space(
        "tokenizers", tokenizers=2, max_tokens=1, faults=Faults(deaths=1, lost_replies=1), mortal=named("tokenizer0")
    ),
    Space(
        "a scheduler pauses, then dies",
        schedulers=2,
        is_warm=True,
        faults=Faults(pauses=1, deaths=1),
        mortal=named("scheduler0"),
        pausing=named("scheduler0"),
    ),
    Space(
        "schedulers lose replies",
        schedulers=2,
        faults=Faults(pauses=1, lost_replies=1),
        pausing=named("scheduler0"),
        max_tokens=1,
    ),
    Space(
        "a detokenizer pauses, then another dies",
        detokenizers=2,
        is_warm=True,
        faults=Faults(pauses=1, deaths=1),
        mortal=named("detokenizer1"),
        pausing=named("detokenizer0"),
    ),
    Space(
        "compaction while a detokenizer pauses",
        detokenizers=2,
        is_warm=True,
        compacts=True,
        faults=Faults(pauses=1),
        pausing=named("detokenizer0"),
    ),
    Space(
        "compaction while a scheduler dies",
        schedulers=2,
        is_warm=True,
        compacts=True,
        faults=Faults(deaths=1),
        mortal=named("scheduler0"),
    ),
    Space(
        "a gateway dies", gateways=2, kinds=ALL_KINDS, is_warm=True, faults=Faults(deaths=1), mortal=named("gateway0")
    ),
    Space(
        "clients change their gateway",
        gateways=2,
        max_tokens=1,
        is_warm=True,
        faults=Faults(broken_connections=2),
    ),
    Space("the server is full", is_warm=True, max_tokens=3, kinds=ALL_KINDS, faults=Faults(refusals=2)),
    Space(
        "a worker dies",
        workers=1,
        schedulers=2,
        is_warm=True,
        faults=Faults(deaths=1),
        mortal=named("worker0"),
    ),
    Space(
        "worker twins",
        workers=2,
        max_tokens=1,
        is_warm=True,
        faults=Faults(pauses=1),
        pausing=named("worker0"),
    ),
    Space(
        "an upgrade",
        workers=2,
        has_two_models=True,
        samples=2,
        max_tokens=1,
        is_warm=True,
        faults=Faults(deaths=1),
        mortal=named("worker0"),
    ),
    Space(
        "prompts are scored, a worker dies",
        workers=2,
        has_two_models=True,
        scores_prompts=True,
        max_tokens=1,
        is_warm=True,
        faults=Faults(deaths=1),
        mortal=named("worker0"),
    ),
    Space(
        "prompts are scored, a scheduler pauses",
        workers=1,
        schedulers=2,
        scores_prompts=True,
        max_tokens=1,
        is_warm=True,
        faults=Faults(pauses=1),
        pausing=named("scheduler0"),
    ),
    Space(
        "prompts are pooled, a worker dies",
        workers=2,
        has_two_models=True,
        pools_prompts=True,
        max_tokens=1,
        is_warm=True,
        faults=Faults(deaths=1),
        mortal=named("worker0"),
    ),
    Space(
        "prompts are pooled, a scheduler pauses",
        workers=1,
        schedulers=2,
        pools_prompts=True,
        max_tokens=1,
        is_warm=True,
        faults=Faults(pauses=1),
        pausing=named("scheduler0"),
    ),
    Space(
        "an upgrade, and a server that restarts",
        workers=2,
        has_two_models=True,
        max_tokens=1,
        is_warm=True,
        keeps_nothing=True,
        faults=Faults(restarts=1, lost_writes=2),
    ),
    Space(
        "a scheduler with a worker dies",
        workers=1,
        max_tokens=1,
        schedulers=2,
        is_warm=True,
        faults=Faults(deaths=1),
        mortal=named("scheduler0"),
    ),
    Space("the server restarts", is_warm=True, faults=Faults(restarts=1, lost_writes=3)),
    Space(
        "all ends, and the server restarts",
        kinds=ALL_KINDS,
        is_warm=True,
        keeps_nothing=True,
        faults=Faults(restarts=1, lost_writes=3),
    ),
    Space(
        "cancels",
        kinds=ALL_KINDS,
        may_cancel=True,
        schedulers=2,
        is_warm=True,
        faults=Faults(deaths=1),
        mortal=named("scheduler0"),
    ),
]
